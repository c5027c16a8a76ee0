#!/usr/bin/env python3
"""The .deb, made by CPack and installed into and removed from a system with nothing else: test_deb.py BUILD MODEL

The system is a chroot that mmdebstrap makes once and the user's cache keeps. Without root, mmdebstrap, a distribution that
is known or a network the package is looked at and the rest is skipped, saying why.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

BUILD, MODEL = sys.argv[1:3]
CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nestedfp")
WANTED = ["usr/bin/nestedfp", "usr/share/man/man1/nestedfp.1", "usr/share/bash-completion/completions/nestedfp",
          "usr/share/zsh/site-functions/_nestedfp", "usr/share/fish/vendor_completions.d/nestedfp.fish",
          "usr/lib/systemd/system/nestedfp.service", "usr/share/doc/nestedfp/LICENSE", "usr/share/doc/nestedfp/examples/serve.toml"]


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def run(*command, **keywords):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **keywords)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def expect(condition, what):
    if not condition:
        sys.exit("failed: " + what)


def make_package(folder):
    run("cpack", "-G", "DEB", "-B", folder, cwd=BUILD)
    (package,) = glob.glob(os.path.join(folder, "*.deb"))
    return package


def look_at(package):
    depends = run("dpkg-deb", "-f", package, "Depends")
    linked = subprocess.run(["objdump", "-p", os.path.join(BUILD, "apps/nestedfp")], capture_output=True, text=True).stdout
    for library in re.findall(r"NEEDED +(\S+)", linked):
        name = re.sub(r"\.so\.", "", library).replace("_", "-").replace("++", r"\+\+")
        if library.startswith(("libm.so", "ld-linux", "libpthread", "libdl", "librt.so")):
            name = "libc6"
        name = {"libstdc\\+\\+6": "libstdc\\+\\+6", "libgcc-s1": "libgcc-s1"}.get(name, name)
        expect(re.search(rf"(^|, )({name}|{name}t64)[ ,]", depends + ","), f"{library} is needed, and Depends is {depends}")
    expect("libcurl4" in depends, f"libcurl4, which pull loads, in {depends}")
    files = [line.split(None, 5)[5].removeprefix("./") for line in run("dpkg-deb", "-c", package).splitlines()]
    for file in WANTED:
        expect(file in files, f"{file} in the package")
    expect(not [file for file in files if "/include/" in file or file.endswith(".a")], "no development files in the package")


def base_system():
    """A tar of the smallest system of this distribution."""
    with open("/etc/os-release") as file:
        suite = re.search(r"^VERSION_CODENAME=(\w+)", file.read(), re.M)
    if not suite:
        skip("this distribution has no code name that mmdebstrap would know")
    path = os.path.join(CACHE, f"chroot-{suite[1]}.tar")
    if not os.path.exists(path):
        os.makedirs(CACHE, exist_ok=True)
        new = f"{path}.tmp-{os.getpid()}.tar"
        try:
            done = subprocess.run(["mmdebstrap", "--mode=root", "--variant=minbase", suite[1], new], capture_output=True, text=True,
                                  timeout=300)
            if done.returncode != 0:
                skip(f"mmdebstrap cannot make a system of {suite[1]} (no network?): " + done.stderr.strip().splitlines()[-1])
            os.replace(new, path)
        except subprocess.TimeoutExpired:
            skip(f"mmdebstrap made no system of {suite[1]} in 300 s (a slow network?)")
        finally:
            if os.path.exists(new):
                os.remove(new)
    return path


def main():
    if not shutil.which("cpack") or not shutil.which("dpkg-shlibdeps"):
        skip("there is no cpack or no dpkg-shlibdeps (dpkg-dev)")
    with tempfile.TemporaryDirectory(prefix="nfp-deb-") as folder:
        package = make_package(folder)
        look_at(package)
        print("the package is right:", run("dpkg-deb", "-f", package, "Depends").strip())
        if os.geteuid() != 0:
            skip("not root: the package was made and looked at, and not installed")
        if not shutil.which("mmdebstrap"):
            skip("mmdebstrap is not installed: the package was made and looked at, and not installed")
        system = os.path.join(folder, "system")
        os.mkdir(system)
        run("tar", "-xpf", base_system(), "-C", system)
        shutil.copy(package, os.path.join(system, "tmp/nestedfp.deb"))
        shutil.copy("/etc/resolv.conf", os.path.join(system, "etc/resolv.conf"))
        if os.path.exists(os.path.join(MODEL, "config.json")):
            shutil.copytree(MODEL, os.path.join(system, "tmp/model"))

        def inside(*command, **keywords):
            return run("chroot", system, "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root",
                       "DEBIAN_FRONTEND=noninteractive", *[f"{name}={value}" for name, value in os.environ.items()
                                                           if name.lower().endswith("_proxy")], *command, **keywords)

        done = subprocess.run(["chroot", system, "apt-get", "-q", "update"], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            skip("apt-get update does not work in the new system (no network?): " + done.stderr.strip())
        before = set(inside("dpkg-query", "-f", "${Package}\n", "-W").split())
        inside("apt-get", "-q", "-y", "install", "--no-install-recommends", "/tmp/nestedfp.deb")
        expect(inside("nestedfp", "--version").strip(), "the program starts")
        inside("nestedfp", "doctor")
        expect("libcurl/" in inside("nestedfp", "doctor"), "pull finds libcurl")
        if os.path.exists(os.path.join(system, "tmp/model")):
            out = inside("nestedfp", "generate", "/tmp/model", "-p", "a b", "-n", "4", "--ignore-eos", "--json")
            expect('"finish_reason"' in out, "the program answers")
        inside("apt-get", "-q", "-y", "purge", "nestedfp")
        inside("apt-get", "-q", "-y", "autoremove", "--purge")
        left = [file for file in WANTED if os.path.exists(os.path.join(system, file))]
        expect(not left, f"nothing is left after the removal, but {left} is")
        after = set(inside("dpkg-query", "-f", "${Package}\n", "-W").split())
        expect(after == before, f"the packages are those from before, but for {before ^ after}")
        print("installed, run and removed in a clean system")


main()
