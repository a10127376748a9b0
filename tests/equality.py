"""Print, as JSON, how far the losses of each variant of the fine-tuning differ from the reference, from a junit-xml report:

python tests/equality.py REPORT.xml
"""

import json
import sys
import xml.etree.ElementTree as ElementTree

from workshop.run.machine import machine

properties = ElementTree.parse(sys.argv[1]).iter("property")
rows = [json.loads(each.get("value")) for each in properties if each.get("name") == "difference"]
print(json.dumps({"machine": machine(), "largest_difference_of_a_loss": rows}, indent=1))
