"""Images: code that runs wherever it is mapped, once a few words are filled in.

An image is what entries need of their objects, one object after another; then stubs, by which code calls what other
libraries have; then, from a page of their own on, the only *words* that differ between processes: addresses in other
libraries, and in the image itself. Everything else is relative to its own place, and so is the same in all processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrt.base.valueclass import valueclass


@valueclass
class ImagePart:
    """One object of an image: its entry, and where its code begins and ends."""

    entry: int
    begin: int
    end: int


@valueclass
class Words:
    """The words of an image, by offset: to hold the address of what is named, or that of an offset in the image."""

    outside: tuple[tuple[int, str], ...] = ()
    own: tuple[tuple[int, int], ...] = ()


@valueclass
class Image:
    """``body`` is to be mapped as it is, at a multiple of 4 KiB at least; from ``tail`` on it is all parts' own."""

    body: bytes
    parts: Mapping[str, ImagePart]
    tail: int
    words: Words
