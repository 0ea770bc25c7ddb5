"""Values are what a frozen, slotted dataclass would be."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import pytest

from flowrt.base.valueclass import make_all, stateclass, valueclass
from flowrt.base.valueclass import replace as made_anew


def made_by(decorator: Any) -> tuple[type, type, type]:
    """The same three classes by either decorator."""

    @decorator
    class Point:
        x: int
        y: float = 0.5
        seen: int = field(default=0, compare=False)
        secret: tuple[int, ...] = field(default=(), repr=False)

        def sum(self) -> float:
            return self.x + self.y

    @decorator
    class Nothing:
        pass

    @decorator
    class Named:
        name: str

        def __repr__(self) -> str:
            return f"<{self.name}>"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Named) and self.name.lower() == other.name.lower()

    return Point, Nothing, Named


STATES = made_by(stateclass)
ALL = (made_by(valueclass), STATES, made_by(dataclass(frozen=True, slots=True)))


@pytest.mark.parametrize("classes", ALL, ids=["valueclass", "stateclass", "dataclass"])
def test_a_value_compares_hashes_and_shows_its_fields(classes: tuple[Any, Any, Any]) -> None:
    point, nothing, named = classes
    nan = float("nan")
    assert point(1, seen=1) == point(1, seen=2) != point(2)
    assert point(1, nan) == point(1, nan)  # the same object, as in a tuple
    assert hash(point(1, seen=1)) == hash(point(1, seen=2)) == hash((1, 0.5, ()))
    assert point(1) != (1, 0.5, ())
    assert nothing() == nothing() != point(1)
    assert hash(nothing()) == hash(())
    assert hash(named("a")) == hash(("a",))
    assert named("a") == named("A")
    assert [repr(v).rpartition("<locals>.")[2] for v in (point(1, secret=(3,)), nothing(), named("a"))] == [
        "Point(x=1, y=0.5, seen=0)",
        "Nothing()",
        "<a>",
    ]


@pytest.mark.parametrize("classes", ALL, ids=["valueclass", "stateclass", "dataclass"])
def test_a_value_cannot_be_changed_but_copied_and_replaced(classes: tuple[Any, Any, Any]) -> None:
    point, *_ = classes
    made = point(1, 2.0, secret=(3,))
    with pytest.raises(FrozenInstanceError):
        made.x = 2
    with pytest.raises(FrozenInstanceError):
        del made.x
    with pytest.raises((AttributeError, TypeError)):
        made.other = 2
    assert hasattr(made, "__dict__") is (classes is STATES)
    assert copy.deepcopy(made) == copy.copy(made) == replace(made) == made
    assert replace(made, x=3).sum() == 5.0
    assert [f.name for f in fields(point)] == ["x", "y", "seen", "secret"]
    match made:
        case point(x, y):
            assert (x, y) == (1, 2.0)


@pytest.mark.parametrize("classes", ALL[:2], ids=["valueclass", "stateclass"])
def test_a_value_made_anew_has_other_values_in_some_fields_and_leaves_the_old_one(
    classes: tuple[Any, Any, Any],
) -> None:
    point, nothing, _ = classes
    old = point(1, 2.0, secret=(3,))
    new = made_anew(old, x=4, seen=5)
    assert (new.x, new.y, new.seen, new.secret) == (4, 2.0, 5, (3,))
    assert old == point(1, 2.0, secret=(3,))
    assert made_anew(nothing()) == nothing()
    with pytest.raises(AttributeError, match="z"):
        made_anew(old, z=1)
    with pytest.raises(FrozenInstanceError):
        new.x = 1


def test_many_values_made_at_once_are_those_made_one_by_one() -> None:
    point: Any = ALL[0][0]
    assert make_all(point, 3, x=[1, 2, 3], seen=(7, 8, 9)) == [point(1, 0.5, 7), point(2, 0.5, 8), point(3, 0.5, 9)]
    assert [value.seen for value in make_all(point, 2, x=[1, 2], seen=[4, 5])] == [4, 5]
    assert make_all(point, 0, x=[]) == []


def shaped_by(decorator: Any) -> Any:
    @decorator
    class Shape:
        sides: tuple[int, ...]
        notes: list[str] = field(default_factory=list)
        unit: str = field(kw_only=True)
        size: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "size", sum(self.sides))

    @decorator
    class Named(Shape):
        name: str = "none"

    return Shape, Named


@pytest.mark.parametrize("decorator", [valueclass, stateclass, dataclass(frozen=True, slots=True)])
def test_a_value_is_made_from_the_parameters_that_a_dataclass_has(decorator: Any) -> None:
    shape, named = shaped_by(decorator)
    made = shape((3, 4), unit="cm")
    assert (made.sides, made.notes, made.unit, made.size) == ((3, 4), [], "cm", 7)
    assert made.notes is not shape((3, 4), unit="cm").notes
    assert named((1,), ["a"], "b", unit="m") == named(sides=(1,), notes=["a"], unit="m", name="b")
    assert list(signature(named).parameters) == ["sides", "notes", "name", "unit"]
    assert signature(shape).parameters["unit"].kind is Parameter.KEYWORD_ONLY
    assert signature(named).parameters["name"].default == "none"
    with pytest.raises(TypeError, match="unit"):
        shape((3, 4))
    with pytest.raises(TypeError, match="colour"):
        shape((3, 4), unit="cm", colour=1)
    assert is_dataclass(shape)
    assert shape.__dataclass_params__.frozen


@pytest.mark.parametrize("decorator", [valueclass, stateclass])
def test_a_field_that_is_no_argument_has_its_default(decorator: Any) -> None:
    @decorator
    class Learner:
        rate: float
        seen: int = field(default=7, init=False)

    assert Learner(0.5).seen == 7
    with pytest.raises(TypeError):
        Learner(0.5, 8)


@valueclass
class Sent:
    """A value that others are made of."""

    x: int
    y: float = 0.5


def test_a_value_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Sent(3))) == Sent(3, 0.5)


def test_a_class_without_values_has_compiled_nothing() -> None:
    point: Any = made_by(valueclass)[0]
    assert not isinstance(vars(point)["__init__"], FunctionType)
    point(1)
    assert isinstance(vars(point)["__init__"], FunctionType)
    assert point.__init__.__qualname__.endswith("Point.__init__")
