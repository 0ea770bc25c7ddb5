"""Relocatable objects of the ELF format (64 bits, little-endian) as plain data: sections, symbols, relocations.

Pure: bytes in, values out. What is not such an object, or is damaged, raises `Unlinkable`; so does what `linking`
cannot make an image of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from flowrt.base.valueclass import valueclass

_MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, the one version
_RELOCATABLE = 1
_SYMBOLS, _ADDENDS, _NO_BITS = 2, 4, 8  # kinds of sections
_SECTION, _SYMBOL, _RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_UNDEFINED, _RESERVED = 0, 0xFF00  # section numbers of symbols: none; from here on, of a meaning of their own
_PLAIN_KINDS = frozenset({0, 1, 2, 3})  # of symbols: no kind, data, function, section; others need a real linker
_SMALLEST = 4  # bytes that a relocation changes
_MOST_BYTES = 1 << 28

X86_64, AARCH64 = 62, 183
WRITABLE = 1  # among a section's flags


class Unlinkable(ValueError):
    """An object that is linked by others, if it is one at all."""


@valueclass
class Relocation:
    """What is to be put at ``offset`` of a section: a ``kind`` of expression of a symbol and an addend."""

    offset: int
    kind: int
    symbol: int
    addend: int


@valueclass
class Section:
    """Bytes that are one piece of memory, and what is to be changed in them."""

    name: str
    flags: int
    alignment: int
    data: bytes
    relocations: tuple[Relocation, ...]


@valueclass
class Symbol:
    """A name for a place in a section; ``section`` is None for what other libraries have."""

    name: str
    section: int | None
    value: int


@valueclass
class Object:
    """A relocatable object of a ``machine``; relocations and symbols refer to others by number."""

    machine: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]


def read_object(code: bytes) -> Object:
    """The object whose file is ``code``."""
    try:
        return _ElfReader(code).read()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise Unlinkable(f"the object is damaged: {error}") from error


@valueclass
class _Header:
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class _ElfReader:
    def __init__(self, code: bytes) -> None:
        self._code = code
        if not code.startswith(_MAGIC):
            raise Unlinkable("it is no ELF object of 64 bits")
        kind, self._machine = struct.unpack_from("<HH", code, 16)
        (first,) = struct.unpack_from("<Q", code, 40)
        size, count, names = struct.unpack_from("<HHH", code, 58)
        if kind != _RELOCATABLE or size != _SECTION.size:
            raise Unlinkable("it is no relocatable object")
        table = code[first : first + size * count]
        self._headers = [_Header(*fields) for fields in _SECTION.iter_unpack(table)]
        self._names = self._bytes(self._headers[names])

    def read(self) -> Object:
        tables = [header for header in self._headers if header.kind == _SYMBOLS]
        if len(tables) != 1:
            raise Unlinkable(f"it has {len(tables)} tables of symbols")
        symbols = tuple(self._symbols(tables[0]))
        changes = {header.info: header for header in self._headers if header.kind == _ADDENDS}
        sections = [self._section(header, changes.get(n), len(symbols)) for n, header in enumerate(self._headers)]
        return Object(self._machine, tuple(sections), symbols)

    def _bytes(self, header: _Header) -> bytes:
        if header.kind == _NO_BITS:
            if header.size > _MOST_BYTES:
                raise Unlinkable(f"a section has {header.size} bytes")
            return bytes(header.size)
        data = self._code[header.offset : header.offset + header.size]
        if len(data) != header.size:
            raise Unlinkable("a section ends behind the object's end")
        return data

    def _section(self, header: _Header, changes: _Header | None, symbols: int) -> Section:
        data, relocations = self._bytes(header), list[Relocation]()
        for offset, info, addend in _RELOCATION.iter_unpack(self._bytes(changes)) if changes is not None else ():
            if offset + _SMALLEST > len(data) or info >> 32 >= symbols:
                raise Unlinkable("a relocation leaves its section, or is of no symbol")
            relocations.append(Relocation(offset, info & 0xFFFFFFFF, info >> 32, addend))
        name = _text(self._names, header.name)
        return Section(name, header.flags, max(header.alignment, 1), data, tuple(relocations))

    def _symbols(self, header: _Header) -> Iterator[Symbol]:
        names = self._bytes(self._headers[header.link])
        for name, info, _, section, value, _ in _SYMBOL.iter_unpack(self._bytes(header)):
            if _RESERVED > section >= len(self._headers):
                raise Unlinkable("a symbol is of no section")
            strange = section >= _RESERVED or info & 15 not in _PLAIN_KINDS
            # A file's own name and the like, which nothing refers to, are as undefined symbols without a name.
            yield Symbol("" if strange else _text(names, name), None if strange or not section else section, value)


def _text(names: bytes, start: int) -> str:
    end = names.find(b"\0", start)
    if end < 0:
        raise Unlinkable("a name has no end")
    return names[start:end].decode()
