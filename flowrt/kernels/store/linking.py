"""From relocatable objects to an `image`.

Law: pure. What an image has room for is linked; what asks for more (memory to write to, an absolute address in code)
raises `Unlinkable`, as does a relocation that is not known here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

from flowrt.base.valueclass import valueclass
from flowrt.kernels.store.elf import AARCH64, WRITABLE, X86_64, Object, Relocation, Unlinkable, read_object
from flowrt.kernels.store.image import Image, ImagePart, Words

Site: TypeAlias = "tuple[int, int]"  # an object and one of its sections
Target: TypeAlias = "str | tuple[Site, int]"  # what another library has, or a place in a section

CODE_ALIGNMENT = 64
_CONSTANTS = ".data.rel.ro"  # written when it is loaded and never after, whatever its flags say


def link(objects: Mapping[str, bytes], page: int) -> Image:
    """The image of ``objects``, each by the symbol of its entry; its words begin at a multiple of ``page``."""
    linker = _Linker(page)
    for symbol, code in objects.items():
        linker.add(symbol, read_object(code))
    return linker.image()


class _Linker:
    def __init__(self, page: int) -> None:
        self._page = page
        self._body = bytearray()
        self._objects: list[Object] = []
        self._at: dict[Site, int] = {}  # where each section is
        self._constants: list[Site] = []
        self._parts: dict[str, ImagePart] = {}
        self._slots: dict[Target, int] = {}  # words that hold the address of something
        self._stubs: dict[str, int] = {}
        self._outside: list[tuple[int, str]] = []
        self._own: list[tuple[int, int]] = []

    def add(self, symbol: str, code: Object) -> None:
        """Put the sections that the entry ``symbol`` needs behind those of other objects."""
        entry = next((s for s in code.symbols if s.name == symbol and s.section is not None), None)
        if entry is None or entry.section is None:
            raise Unlinkable(f"there is no {symbol} in it")
        if code.machine not in _MACHINES or (self._objects and code.machine != self._objects[0].machine):
            raise Unlinkable(f"it is for the machine {code.machine}")
        number = len(self._objects)
        self._objects.append(code)
        begin = self._align(CODE_ALIGNMENT)
        for section in _reached(code, entry.section):
            site = number, section
            if code.sections[section].name.startswith(_CONSTANTS):
                self._constants.append(site)
            elif code.sections[section].flags & WRITABLE:
                raise Unlinkable(f"it writes to its section {code.sections[section].name}")
            else:
                self._place(site)
        start = self._at.get((number, entry.section))
        if start is None or entry.value >= len(self._body) - start:
            raise Unlinkable(f"{symbol} is no code")
        self._parts[symbol] = ImagePart(start + entry.value, begin, len(self._body))

    def image(self) -> Image:
        tail = self._align(CODE_ALIGNMENT)
        machine = _MACHINES[self._objects[0].machine] if self._objects else None
        if machine is not None:
            self._reserve(machine)
            for site, place in self._at.items():
                for relocation in self._objects[site[0]].sections[site[1]].relocations:
                    self._relocate(machine, site, place + relocation.offset, relocation)
            for name, place in self._stubs.items():
                machine.stub(self._body, place, self._slots[name])
            for target, place in self._slots.items():
                self._fill(place, target, 0)
        return Image(bytes(self._body), self._parts, tail, Words(tuple(self._outside), tuple(self._own)))

    def _reserve(self, machine: _Machine) -> None:
        """Give stubs, words and constants their places."""
        for site in (*self._at, *self._constants):
            for relocation in self._objects[site[0]].sections[site[1]].relocations:
                target = self._target(site, relocation)
                if relocation.kind in machine.calls and isinstance(target, str):
                    self._stubs[target] = self._slots[target] = 0
                elif relocation.kind in machine.slots:
                    self._slots[target] = 0
        for name in self._stubs:
            self._stubs[name] = self._align(16)
            self._body += bytes(machine.stub_bytes)
        self._align(self._page)
        for wanted in self._slots:
            self._slots[wanted] = self._align(8)
            self._body += bytes(8)
        for site in self._constants:
            self._place(site)

    def _align(self, alignment: int) -> int:
        self._body += bytes(-len(self._body) % alignment)
        return len(self._body)

    def _place(self, site: Site) -> None:
        section = self._objects[site[0]].sections[site[1]]
        if section.alignment > 4096 or section.alignment & (section.alignment - 1):
            raise Unlinkable(f"its section {section.name} is to be aligned to {section.alignment}")
        self._at[site] = self._align(section.alignment)
        self._body += section.data

    def _target(self, site: Site, relocation: Relocation) -> Target:
        """What a relocation refers to."""
        symbol = self._objects[site[0]].symbols[relocation.symbol]
        if symbol.section is not None:
            return (site[0], symbol.section), symbol.value
        if not symbol.name:
            raise Unlinkable("a relocation refers to nothing")
        return symbol.name

    def _relocate(self, machine: _Machine, site: Site, place: int, relocation: Relocation) -> None:
        target = self._target(site, relocation)
        if relocation.kind == machine.word:
            if site not in self._constants:
                raise Unlinkable("there is an address in what is never written")
            self._fill(place, target, relocation.addend)
            return
        if relocation.kind in machine.slots:
            where = self._slots[target]
        elif isinstance(target, str):
            if relocation.kind not in machine.calls:
                raise Unlinkable(f"it refers to {target} as if that were its own")
            where = self._stubs[target]
        else:
            where = self._at[target[0]] + target[1]
        patch = machine.patches.get(relocation.kind)
        if patch is None:
            raise Unlinkable(f"it has a relocation of kind {relocation.kind}")
        patch(self._body, place, where + relocation.addend)

    def _fill(self, place: int, target: Target, addend: int) -> None:
        """Note what a word is to hold."""
        if place + 8 > len(self._body):
            raise Unlinkable("a relocation leaves its section")
        if isinstance(target, str):
            if addend:
                raise Unlinkable(f"it looks into {target}")
            self._outside.append((place, target))
        else:
            self._own.append((place, self._at[target[0]] + target[1] + addend))


def _reached(code: Object, first: int) -> list[int]:
    """The sections that code in the section ``first`` may come to, in order of discovery."""
    found = [first]
    for section in found:
        for relocation in code.sections[section].relocations:
            other = code.symbols[relocation.symbol].section
            if other is not None and other not in found:
                found.append(other)
    return found


# ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Patch: TypeAlias = Callable[[bytearray, int, int], None]
"""Change the body at a place so that it refers to a target, both by offset."""


@valueclass
class _Machine:
    """A machine's relocations by kind: ``word`` is an address of 64 bits, ``slots`` refer to a word that holds one,
    ``calls`` may go to a stub.
    """

    word: int
    calls: frozenset[int]
    slots: frozenset[int]
    patches: Mapping[int, Patch]
    stub_bytes: int
    stub: Patch


def _signed(value: int, bits: int) -> int:
    """The lowest ``bits`` of a value that fits them."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise Unlinkable(f"a distance of {value} does not fit {bits} bits")
    return value & ((1 << bits) - 1)


def _relative(bits: int) -> Patch:
    def patch(body: bytearray, place: int, target: int) -> None:
        size = bits // 8
        if place + size > len(body):
            raise Unlinkable("a relocation leaves its section")
        body[place : place + size] = _signed(target - place, bits).to_bytes(size, "little")

    return patch


def _x86_stub(body: bytearray, place: int, slot: int) -> None:
    struct.pack_into("<2sI", body, place, b"\xff\x25", _signed(slot - place - 6, 32))  # jmp *slot(%rip)


def _instruction(mask: int, value: Callable[[int, int], int]) -> Patch:
    """Put ``value(place, target)`` in the bits ``mask`` of the instruction at a place."""

    def patch(body: bytearray, place: int, target: int) -> None:
        (word,) = struct.unpack_from("<I", body, place)
        struct.pack_into("<I", body, place, word & ~mask | value(place, target) & mask)

    return patch


def _branch(place: int, target: int) -> int:
    return _signed(target - place, 28) >> 2


def _page_distance(place: int, target: int) -> int:
    """How many pages of 4 KiB are between the two, as ``adrp`` has it."""
    pages = _signed((target >> 12) - (place >> 12), 21)
    return (pages & 3) << 29 | (pages >> 2) << 5


def _in_page(scale: int) -> Patch:
    """The offset within its page of what is loaded or stored in pieces of ``1 << scale`` bytes."""

    def value(place: int, target: int) -> int:
        if target & ((1 << scale) - 1):
            raise Unlinkable("what is loaded is not aligned")
        return (target & 0xFFF) >> scale << 10

    return _instruction(0xFFF << 10, value)


_PAGE = _instruction(3 << 29 | 0x7FFFF << 5, _page_distance)


def _arm_stub(body: bytearray, place: int, slot: int) -> None:
    struct.pack_into("<III", body, place, 0x90000010, 0xF9400210, 0xD61F0200)  # adrp x16; ldr x16, [x16]; br x16
    _PAGE(body, place, slot)
    _in_page(3)(body, place + 4, slot)


_MACHINES = {
    X86_64: _Machine(
        word=1,
        calls=frozenset({4}),  # PLT32
        slots=frozenset({9, 41, 42}),  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
        patches={2: _relative(32), 4: _relative(32), 24: _relative(64)} | dict.fromkeys((9, 41, 42), _relative(32)),
        stub_bytes=6,
        stub=_x86_stub,
    ),
    AARCH64: _Machine(
        word=257,
        calls=frozenset({282, 283}),  # JUMP26, CALL26
        slots=frozenset({311, 312}),  # ADR_GOT_PAGE, LD64_GOT_LO12_NC
        patches={
            260: _relative(64),
            261: _relative(32),
            275: _PAGE,  # ADR_PREL_PG_HI21
            276: _PAGE,
            277: _in_page(0),  # ADD_ABS_LO12_NC
            278: _in_page(0),  # LDST8 and so on
            284: _in_page(1),
            285: _in_page(2),
            286: _in_page(3),
            299: _in_page(4),
            282: _instruction(0x3FFFFFF, _branch),
            283: _instruction(0x3FFFFFF, _branch),
            311: _PAGE,
            312: _in_page(3),
        },
        stub_bytes=12,
        stub=_arm_stub,
    ),
}
