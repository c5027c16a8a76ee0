"""What the programs of this folder have alike: how they are called, the machine that they ran on, the result as a JSON file."""

import json
import os
import platform
import re
import sys
import time


def arguments(usage, least):
    """Of the command line; where there are fewer, or --help, `usage` is what is said."""
    given = sys.argv[1:]
    if given[:1] in (["-h"], ["--help"]):
        print(usage)
        sys.exit(0)
    if len(given) < least:
        sys.exit(usage)
    return given


def check(out):
    """Ends the program where `out` cannot be written, before it measures for minutes."""
    new = not os.path.exists(out)
    try:
        with open(out, "a", encoding="utf-8"):
            pass
    except OSError as failed:
        sys.exit(f"{out}: cannot be written: {failed.strerror}")
    if new:
        os.remove(out)


def host():
    with open("/proc/cpuinfo", encoding="ascii") as f:
        cpu = re.search(r"model name\s*: (.*)", f.read())
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "machine": cpu.group(1) if cpu else platform.machine(),
            "cpus": len(os.sched_getaffinity(0)), "real_time_priority": os.sched_getscheduler(0) != os.SCHED_OTHER}


def cpu_seconds(pid):
    """Of all threads that the process has had, user and system."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def save(result, out):
    text = json.dumps(result, indent=1)
    with open(out, "w", encoding="utf-8") as f:
        f.write(text + "\n")
    print(text)
