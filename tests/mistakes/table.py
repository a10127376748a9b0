"""The bank as a table: python tests/mistakes/table.py REPORT.xml prints JSON from a report that pytest --junit-xml wrote."""

import json
import sys
import xml.etree.ElementTree as ElementTree

rows = []
for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    found = {each.get("name"): each.get("value") for each in case.iter("property")}
    if "expected" in found:
        mistake = case.get("name").split("[")[1].rstrip("]")
        rows.append(
            {
                "mistake": mistake,
                **{name: found[name] for name in ("expected", "named")},
                "seconds": float(found["seconds"]),
            }
        )
named = sum(row["named"] in row["expected"].split(" or ") for row in rows)
print(f'{{"mistakes": {len(rows)}, "named_right": {named}, "table": [')
print(",\n".join(json.dumps(row) for row in rows))
print("]}")
