"""Which saved value becomes which variable: nothing is left over, made up or bent in silence.

Law: pure. What a checkpoint and a graph do not have in common is told all at once, before anything is written, with the
ways around: ``rename`` maps names and scopes of the checkpoint to the graph's, and ``partial`` says that what only one
of them has, or has otherwise, is meant to be left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice, product
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.errors import CheckpointError, GraphError, user_site
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace, valueclass
from flowrt.graph import scopes_of

if TYPE_CHECKING:
    from flowrt.graph import Graph, Resource
    from flowrt.session.building_order import Order

Name: TypeAlias = tuple[str, str]
Specs: TypeAlias = Mapping[Name, Spec]
Rules: TypeAlias = Mapping[str, str]

OWN_NAMES = (
    "give every fr.Variable a name=, layers that use the same names an fr.name_scope each, and trainers, and "
    "optimisers (in minimize) that share variables, a name="
)

MOST_LISTED = 100  # of one kind, in one error
MOST_TRIED = 10  # names on either side that a hint looks at


@valueclass
class Fit:
    """What a checkpoint and a graph have in common, and what not.

    ``restored`` tells for each variable the name it is saved by, and so does ``other``, where dtype or shape differ.
    ``missing`` variables are not saved. ``unused`` is what is saved for no variable, with its name after renaming.
    """

    restored: dict[Name, Name]
    other: dict[Name, Name]
    missing: tuple[Name, ...]
    unused: dict[Name, Name]

    @property
    def whole(self) -> bool:
        """Whether every variable is restored, and everything saved is used."""
        return not (self.other or self.missing or self.unused)

    def __str__(self) -> str:
        parts = ("not saved", self.missing), ("not used", self.unused), ("of another dtype or shape", self.other)
        return "; ".join(f"{what}: {listed(map(_said, names))}" for what, names in parts if names)


def checked_renames(rename: Rules | None) -> dict[str, str]:
    """What a program gave as ``rename``, without slashes at the ends of scopes; raises `GraphError`."""
    given = {} if rename is None else rename
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for pair in given.items() for n in pair):
        raise GraphError(f"{user_site()}: rename is {{'saved name': 'name in the graph'}}, got {rename!r:.200}")
    return {old.rstrip("/"): new.rstrip("/") for old, new in given.items()}


def fit(saved: Specs, order: Order | None, graph: Graph, rename: Rules, partial: bool, what: str) -> Fit:
    """Which of the ``saved`` goes into which variable of ``graph``; ``what`` names the checkpoint.

    What is called by the ``order`` of building is the same variable only in a graph that was built in the same one;
    renaming it tells. Raises `CheckpointError` for renames that mean nothing, for two values that would go into one
    variable, and for whatever is not common to both. If it is to be ``partial``, only where nothing is.
    """
    held = as_seen(graph)
    mirrors = {(p.container, shard) for p in graph.partitions.values() if p.is_mirrored for shard in p.shards}
    saved = {name: spec for name, spec in saved.items() if name in held or name not in mirrors}
    vague = _vague((*saved, *held), order, graph)
    become, problems = _renamed(saved, rename, vague)
    problems += _idle_renames(saved, held.keys() - vague, rename)
    found = _compared(saved, held, become, vague)
    differs = not found.whole and not (partial and (found.restored or not held))
    if problems or differs:
        lines = [*problems, *(_differences(found, saved, held, vague) if differs else ())]
        if not problems:
            lines += _ways_around(found, saved, held, vague)
        raise CheckpointError("\n  ".join([f"{what} does not fit the graph:", *lines]))
    return found


def as_seen(graph: Graph) -> dict[Name, Resource]:
    """The variables of a graph as the program sees them: what several hold together is one."""
    held = {name: resource for name, resource in graph.resources.items() if resource.kind == "variable"}
    for partition in graph.partitions.values():
        shards = [held.pop((partition.container, shard)) for shard in partition.shards]
        whole = replace(shards[0], name=partition.name, specs=(partition.spec,))
        held[partition.container, partition.name] = whole
    return held


def _vague(names: Iterable[Name], order: Order | None, graph: Graph) -> frozenset[Name]:
    """Those of the names that need not mean the same in a checkpoint and in ``graph``."""
    if order is not None and order.holds_in(graph):
        return frozenset()
    counted = frozenset() if order is None else order.names
    return frozenset(name for name in names if name[1] in counted or graph.is_counted(name[1]))


def _compared(saved: Specs, held: Mapping[Name, Resource], become: Mapping[Name, Name], vague: Collection[Name]) -> Fit:
    restored: dict[Name, Name] = {}
    other: dict[Name, Name] = {}
    missing = []
    for name, resource in held.items():
        if name in vague or name not in become:
            missing.append(name)
        else:
            old = saved[become[name]]
            fits = resource.specs[0].accepts(old.dtype, old.concrete)
            (restored if fits else other)[name] = become[name]
    used = {*restored.values(), *other.values()}
    called = {old: new for new, old in become.items()}
    return Fit(restored, other, tuple(missing), {old: called.get(old, old) for old in saved if old not in used})


# Renaming


def _within(name: str, scope: str) -> bool:
    """Whether ``name`` is ``scope``, or lies in it, as what an optimiser keeps for a variable does."""
    return not scope or name == scope or name.startswith(f"{scope}/")


def _moved(name: str, old: str, new: str) -> str:
    """``name``, which lies within ``old``, within ``new`` instead."""
    rest = name.removeprefix(old).removeprefix("/")
    return "/".join(part for part in (new, rest) if part)


def _rule(name: str, rename: Rules) -> str | None:
    """The old name by which ``name`` changes: the longest that fits."""
    return max((old for old in rename if _within(name, old)), key=len, default=None)


def _renamed(saved: Iterable[Name], rename: Rules, vague: Collection[Name]) -> tuple[dict[Name, Name], list[str]]:
    """What is saved, by its name in the graph, and what is wrong with that.

    What the user renamed goes before what has that name already.
    """
    rules = {name: _rule(name[1], rename) for name in saved}
    become: dict[Name, Name] = {}
    problems = []
    for name in sorted(rules, key=lambda name: rules[name] is None):
        rule = rules[name]
        if rule is None and name in vague:
            continue
        new = name if rule is None else (name[0], _moved(name[1], rule, rename[rule]))
        if new not in become:
            become[new] = name
        elif rule is not None:
            problems.append(f"rename: {_said(become[new])} and {_said(name)} would both become {_said(new)}")
    return become, problems


def _idle_renames(saved: Iterable[Name], wanted: Iterable[Name], rename: Rules) -> list[str]:
    """What is wrong with renames of nothing that is saved, or to nothing that the graph has."""
    names, has, problems = {name for _, name in saved}, {name for _, name in wanted}, []
    for old, new in rename.items():
        mine = [name for name in names if _rule(name, rename) == old]
        if not mine:
            done = f"; leave it out, {new!r} is saved" if any(_within(name, new) for name in names) else ""
            like = done or _like(old, names)
            problems.append(f"rename={{{old!r}: {new!r}}}: nothing saved is called {old!r}{like}")
        elif not any(_moved(name, old, new) in has for name in mine):
            problems.append(f"rename={{{old!r}: {new!r}}}: the graph has no variable {new!r}{_like(new, has)}")
    return problems


def _like(name: str, names: Collection[str]) -> str:
    known = sorted({*names, *(scope for other in names for scope in scopes_of(other))})
    near = get_close_matches(name, known, n=1)
    return f", nor anything in such a scope{f'; did you mean {near[0]!r}?' if near else ''}"


# What is told


def _said(name: Name) -> str:
    container, own = name
    return f"{own!r} of container {container!r}" if container else repr(own)


def listed(items: Iterable[str]) -> str:
    """At most `MOST_LISTED` of the items, and how many there are besides."""
    all_of_them = list(items)
    more = len(all_of_them) - MOST_LISTED
    return ", ".join(all_of_them[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _differences(found: Fit, saved: Specs, held: Mapping[Name, Resource], vague: Collection[Name]) -> Iterator[str]:
    here = {name: f"{_said(name)} {held[name].specs[0]} ({held[name].site})" for name in found.missing}
    there = {
        old: f"{_said(old)} {saved[old]}{'' if old == new else f', renamed {_said(new)}'}"
        for old, new in found.unused.items()
    }
    for what, each in (("in the graph, but not saved", here), ("saved, but not in the graph", there)):
        if mine := [text for name, text in each.items() if name not in vague]:
            yield f"{what}: {listed(mine)}"
    if found.other:
        both = (
            f"{_said(name)} is {held[name].specs[0]} ({held[name].site}), but saved "
            f"{'' if old == name else f'as {_said(old)}, '}{saved[old]}"
            for name, old in found.other.items()
        )
        yield f"of another dtype or shape: {listed(both)}"
    for what, each in (("in the graph", here), ("saved", there)):
        if mine := [text for name, text in each.items() if name in vague]:
            yield f"{what}, without a name of their own: {listed(mine)}"


def _ways_around(found: Fit, saved: Specs, held: Mapping[Name, Resource], vague: Collection[Name]) -> Iterator[str]:
    if any(name in vague for name in (*found.missing, *found.unused)):
        yield (
            "which of those without a name is which hangs on the order in which they were built, and the graph has "
            f"changed; {OWN_NAMES}, and tell by rename which of them the saved ones are"
        )
    if found.missing and found.unused:
        hint = _suggested(found, saved, held, vague) or "{saved name: name in the graph}"
        yield f"fr.Checkpoints(..., rename={hint}) restores what has another name now"
    if held and not found.restored:
        yield "nothing is common to both, so partial=True restores nothing"
    else:
        yield "fr.Checkpoints(..., partial=True) restores what is common to both, and leaves the rest as it is"


def _suggested(found: Fit, saved: Specs, held: Mapping[Name, Resource], vague: Collection[Name]) -> dict[str, str]:
    """Renamings of names and scopes that would restore what is missing, as far as it is clear which is which."""
    missing = {name: held[name].specs[0] for name in found.missing if name not in vague}
    unused, rename = dict.fromkeys(found.unused), dict[str, str]()
    while len(rename) < MOST_TRIED:
        gains: dict[tuple[str, str], tuple[int, bool, bool]] = {}
        for old, new in product(islice(unused, MOST_TRIED), islice(missing, MOST_TRIED)):
            if old[0] == new[0] and saved[old] == missing[new]:
                whole, scopes = (old[1], new[1]), _apart(old[1], new[1])
                for pair in (whole, scopes):  # names that end alike are likelier, and scopes say it once for all
                    gains[pair] = _gain(*pair, saved, unused, missing), scopes != whole, pair == scopes
        pairs = [pair for pair, gain in gains.items() if gain == max(gains.values()) and gain[0] > 0]
        best = dict(pairs)
        if not best or len({*best.values()}) < len(pairs) or len(best) < len(pairs):
            break  # nothing, or one of several
        rename |= best
        unused = {name: None for name in unused if _rule(name[1], best) is None}
        missing = {name: spec for name, spec in missing.items() if not any(_within(name[1], n) for n in best.values())}
    return rename


def _gain(old: str, new: str, saved: Specs, unused: Collection[Name], missing: Specs) -> int:
    """How many more variables would be restored if ``old`` were renamed ``new``."""
    inside = [name for name in saved if _within(name[1], old)]
    fitting = sum(saved[name] == missing.get((name[0], _moved(name[1], old, new))) for name in inside)
    return fitting - sum(name not in unused for name in inside)


def _apart(one: str, other: str) -> tuple[str, str]:
    """Both names without the parts in which they end alike."""
    left, right = one.split("/"), other.split("/")
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return "/".join(left), "/".join(right)
