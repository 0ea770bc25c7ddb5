"""Linking: objects become images that run anywhere, on the machine here, and as far as can be seen on others."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from typing import TYPE_CHECKING

import llvmlite.binding as llvm
import pytest

from flowrt.base.errors import InternalError
from flowrt.kernels.store.elf import Unlinkable, read_object
from flowrt.kernels.store.linking import link
from flowrt.kernels.store.loading import PAGE, load_object, map_image

if TYPE_CHECKING:
    from flowrt.kernels.store.image import Image

HERE = llvm.get_process_triple()
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
linked_here = pytest.mark.skipif(
    not HERE.startswith(("x86_64", "aarch64")) or "linux" not in HERE, reason="no ELF here"
)

SUM = """
@table = internal constant [4 x double] [double 1.5, double 2.25, double -8.0, double 0.125], align 32
define double @NAME(i64 %i) {
  %at = and i64 %i, 3
  %place = getelementptr [4 x double], ptr @table, i64 0, i64 %at
  %value = load double, ptr %place
  %sum = fadd double %value, 3.141592653589793
  ret double %sum
}
"""
CALLS = """
declare double @exp(double)
declare double @cos(double)
define internal double @twice(double %x) noinline { %y = call double @exp(double %x)
  %z = fadd double %y, %y
  ret double %z }
define double @NAME(i64 %i) {
  %x = sitofp i64 %i to double
  %a = call double @twice(double %x)
  %b = call double @cos(double %x)
  %c = fadd double %a, %b
  ret double %c
}
"""
ADDRESSES = """
declare double @exp(double)
declare double @cos(double)
@functions = internal constant [2 x ptr] [ptr @exp, ptr @third]
define internal double @third(double %x) { %y = fmul double %x, 0x3FD5555555555555
  ret double %y }
define double @NAME(i64 %i) {
  %x = sitofp i64 %i to double
  %at = and i64 %i, 1
  %place = getelementptr [2 x ptr], ptr @functions, i64 0, i64 %at
  %function = load volatile ptr, ptr %place
  %y = call double %function(double %x)
  ret double %y
}
"""
WRITES = """
@count = internal global i64 7
define double @NAME(i64 %i) {
  %n = load i64, ptr @count
  %m = add i64 %n, %i
  store i64 %m, ptr @count
  %y = sitofp i64 %m to double
  ret double %y
}
"""
PROGRAMS = {
    SUM: lambda i: [1.5, 2.25, -8.0, 0.125][i & 3] + math.pi,
    CALLS: lambda i: 2 * math.exp(i) + math.cos(i),
    ADDRESSES: lambda i: i / 3 if i & 1 else math.exp(i),
}
NAMES = {SUM: "sum", CALLS: "calls", ADDRESSES: "addresses", WRITES: "writes"}


def compiled(program: str, symbol: str = "entry", triple: str = HERE) -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(program.replace("NAME", symbol))
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=3, reloc="pic", codemodel="default")
    code: bytes = machine.emit_object(module)
    return code


def called(address: int, argument: int) -> float:
    return float(ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(address)(argument))


@linked_here
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES.get)
def test_an_image_computes_what_the_object_says(program: str) -> None:
    image = link({"entry": compiled(program)}, 8)
    at = map_image(image)
    for argument in range(6):
        assert called(at + image.parts["entry"].entry, argument) == pytest.approx(
            PROGRAMS[program](argument), rel=1e-15
        )


@linked_here
def test_objects_in_one_image_share_words_and_do_not_answer_for_each_other() -> None:
    programs = [*PROGRAMS, *PROGRAMS]
    image = link({f"entry{n}": compiled(program, f"entry{n}") for n, program in enumerate(programs)}, PAGE)
    assert sorted({name for _, name in image.words.outside}) == ["cos", "exp"]
    places = [place for place, _ in (*image.words.outside, *image.words.own)]
    assert len(set(places)) == len(places)
    assert min(places) % PAGE == 0  # nothing before a page of their own is ever written
    at = map_image(image)
    for number, program in enumerate(programs):
        entry = at + image.parts[f"entry{number}"].entry
        assert called(entry, number) == pytest.approx(PROGRAMS[program](number), rel=1e-15)


@linked_here
def test_what_cannot_be_linked_is_loaded_by_llvm() -> None:
    code = compiled(WRITES, "flowrt_test_writes")
    with pytest.raises(Unlinkable, match=r"writes to its section \.data"):
        link({"flowrt_test_writes": code}, 8)
    entry = load_object("flowrt_test_writes", code)
    assert [called(entry, 2), called(entry, 2)] == [9.0, 11.0]


@linked_here
def test_an_image_is_read_and_run_but_not_written() -> None:
    entry = load_object("entry", compiled(CALLS))
    with open("/proc/self/maps") as maps:
        ranges = [(line.split()[0].split("-"), line.split()[1]) for line in maps]
    assert [rights for (begin, end), rights in ranges if int(begin, 16) <= entry < int(end, 16)] == ["r-xp"]


@linked_here
def test_a_function_that_no_library_has_is_named() -> None:
    code = compiled(CALLS.replace("@exp", "@flowrt_no_such_function"))
    with pytest.raises(InternalError, match="flowrt_no_such_function"):
        load_object("entry", code)


@pytest.mark.parametrize("triple", [X86, ARM])
def test_a_damaged_object_is_refused_or_linked_within_its_bounds(triple: str) -> None:
    code, rng = compiled(ADDRESSES, triple=triple), random.Random(7)
    link({"entry": code}, 8)
    with pytest.raises(Unlinkable, match="no other"):
        link({"other": code}, 8)
    for size in range(0, len(code), 3):
        attempt(code[:size])
    for _ in range(3000):
        changed = bytearray(code)
        for _ in range(rng.choice((1, 1, 8))):
            changed[rng.randrange(len(code))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        attempt(bytes(changed))


def attempt(code: bytes) -> None:
    try:
        image = link({"entry": code}, 8)
    except Unlinkable:
        return
    places = [place for place, _ in (*image.words.outside, *image.words.own)]
    assert all(0 <= place <= len(image.body) - 8 for place in places)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (b"", "no ELF"),
        (b"\xcf\xfa\xed\xfe" + bytes(100), "no ELF"),  # Mach-O
        (b"\x7fELF\x01\x01\x01" + bytes(100), "no ELF"),  # 32 bits
        (b"\x7fELF\x02\x01\x01", "damaged"),
    ],
)
def test_what_is_no_object_of_64_bits_is_refused(code: bytes, reason: str) -> None:
    with pytest.raises(Unlinkable, match=reason):
        read_object(code)


def test_objects_of_two_machines_make_no_image() -> None:
    with pytest.raises(Unlinkable, match="machine 183"):
        link({"a": compiled(SUM, "a", X86), "b": compiled(SUM, "b", ARM)}, PAGE)
    riscv = compiled(SUM, triple="riscv64-unknown-linux-gnu")
    with pytest.raises(Unlinkable, match="machine 243"):
        link({"entry": riscv}, PAGE)


# ── code for ARM, read instruction by instruction ────────────────────────────────────────────────────────────────────


class Arm:
    """As much of AArch64 as tells what an instruction refers to."""

    def __init__(self, image: Image) -> None:
        self.words = [word for (word,) in struct.iter_unpack("<I", image.body[: len(image.body) & ~3])]
        self.slots = dict(image.words.outside) | dict(image.words.own)

    def page(self, place: int) -> tuple[int, int]:
        """The register that ``adrp`` at a place writes, and the page it puts there."""
        word = self.words[place // 4]
        assert word & 0x9F000000 == 0x90000000
        pages = (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
        pages -= (pages >> 20) << 21
        return word & 31, ((place >> 12) + pages) << 12

    def pairs(self, begin: int, end: int) -> list[int]:
        """The places that every ``adrp`` with the next use of its register refers to."""
        found = []
        for place in range(begin, end, 4):
            if self.words[place // 4] & 0x9F000000 != 0x90000000:
                continue
            register, page = self.page(place)
            for after in range(place + 4, end, 4):
                word = self.words[after // 4]
                if word >> 5 & 31 == register and word & 0xFFC00000 in _SCALES:
                    found.append(page + ((word >> 10 & 0xFFF) << _SCALES[word & 0xFFC00000]))
                    break
        return found

    def call(self, place: int) -> int:
        distance = self.words[place // 4] & 0x3FFFFFF
        return place + 4 * (distance - (distance >> 25 << 26))


_SCALES = {0x91000000: 0, 0xF9400000: 3, 0xFD400000: 3, 0x3DC00000: 4}  # add, ldr x, ldr d, ldr q


def test_code_for_arm_refers_to_its_constants() -> None:
    image = link({"entry": compiled(SUM, triple=ARM)}, PAGE)
    part = image.parts["entry"]
    held = [struct.unpack_from("<d", image.body, place)[0] for place in Arm(image).pairs(part.begin, part.end)]
    assert 1.5 in held or math.pi in held
    assert set(held) <= {1.5, math.pi}


def test_code_for_arm_calls_others_by_stubs_that_read_their_words() -> None:
    image = link({"entry": compiled(CALLS, triple=ARM)}, PAGE)
    arm, part = Arm(image), image.parts["entry"]
    calls = [arm.call(place) for place in range(part.begin, part.end, 4) if arm.words[place // 4] >> 26 == 0b100101]
    stubs = [target for target in calls if target >= image.tail]
    for stub in stubs:
        assert arm.words[stub // 4 + 2] == 0xD61F0200  # br x16
    reached = [arm.slots[place] for stub in stubs for place in arm.pairs(stub, stub + 12)]
    assert sorted(reached) == ["cos", "exp"]
    assert set(calls) - set(stubs) <= set(range(part.begin, part.end, 4))


def test_code_for_arm_finds_the_addresses_in_its_words() -> None:
    image = link({"entry": compiled(ADDRESSES, triple=ARM)}, PAGE)
    arm, part = Arm(image), image.parts["entry"]
    table = [place for place in arm.pairs(part.begin, part.end) if place >= image.tail]
    assert len(table) == 1
    assert arm.slots[table[0]] == "exp"
    third = arm.slots[table[0] + 8]
    assert part.begin <= third < part.end
