"""Run ONNX's own tests of backends and print what came of them; fails where an answer is wrong."""

from __future__ import annotations

import re
import sys
from collections import Counter

from onnx_world import all_cases, run_case

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")

outcomes = [run_case(case) for case in all_cases(sys.argv[1:] or KINDS)]
passed = [one for one in outcomes if one.passed]
refused = Counter(re.sub(r"^(\w+) .*?: |^\S+:\d+: ", r"\1: ", one.refused) for one in outcomes if one.refused)
wrong = [one for one in outcomes if one.wrong]
print(f"{len(passed)} passed, {sum(one.fixed for one in passed)} of them with inputs that sizes or axes hang on given")
print(f"{sum(refused.values())} refused:")
for why, count in refused.most_common():
    print(f"{count:5}  {why[:150]}")
print(f"{len(wrong)} wrong")
for one in wrong:
    print(f"{one.name}: {one.wrong}")
sys.exit(bool(wrong))
