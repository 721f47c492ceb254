#!/usr/bin/env python3
"""Adds up JUnit files of a folder: `count.py DIR FAILED_STAGES` prints "N passed, N failed" (and
", N skipped" if any) as the last line; names what failed; exits 1 unless all passed and some ran."""
import pathlib
import sys
import xml.etree.ElementTree as ET


def main():
    passed = skipped = 0
    failed = []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.xml")):
        for case in ET.parse(path).getroot().iter("testcase"):
            name = f"{path.stem}: {case.get('classname', '')}.{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    for name in failed:
        print("FAILED", name)
    n_failed = max(len(failed), int(sys.argv[2]))
    if passed == 0 and n_failed == 0:
        n_failed = 1  # nothing ran: that is no success
    print(f"{passed} passed, {n_failed} failed" + (f", {skipped} skipped" if skipped else ""))
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
