"""What the programs of this folder write down alike: the machine that they ran on, and the result as a JSON file."""

import json
import os
import platform
import re
import time


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
