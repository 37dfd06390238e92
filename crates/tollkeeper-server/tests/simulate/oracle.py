"""Decides a log in combined format by two limits, without any code of Tollkeeper.

fixed:  5 requests of an address in each aligned window of 10 s
log:    20 requests of a path in any 7 s

Prints for each line, in the order of arrival, whether each limit allows it: `1 0`. A request is charged to both or to
neither.
"""

import collections
import datetime
import re
import sys

LINE = re.compile(r'(\S+) - - \[(.+?)\] "GET (\S+) HTTP/1.1" \d+ \d+ "-" "-"')

seconds = collections.defaultdict(list)
for line in open(sys.argv[1]):
    ip, stamp, path = LINE.match(line).groups()
    second = int(datetime.datetime.strptime(stamp, "%d/%b/%Y:%H:%M:%S %z").timestamp())
    seconds[second].append((ip, path))

windows = {}
log = collections.defaultdict(list)
for second in sorted(seconds):
    for index, (ip, path) in enumerate(seconds[second]):
        now = second * 1_000_000 + index * 1_000_000 // len(seconds[second])
        window = now // 10_000_000
        start, used = windows.get(ip, (window, 0))
        used = used if start == window else 0
        recent = [then for then in log[path] if now - then < 7_000_000]
        fixed_allows, log_allows = used < 5, len(recent) < 20
        if fixed_allows and log_allows:
            windows[ip] = (window, used + 1)
            recent.append(now)
        log[path] = recent
        print(int(fixed_allows), int(log_allows))
