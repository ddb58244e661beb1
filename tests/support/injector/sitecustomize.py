"""Put on PYTHONPATH of a server process, this makes its system calls on one directory fail as a control file says.

The file named by INJECT_CONTROL holds JSON and is looked at before each call: for the
name of a function of `os` the name of an errno, ``short`` for as few bytes as the
system may transfer, or seconds that the call takes longer; for ``time`` the seconds by which the clock is wrong. INJECT_UNDER
is the directory.
"""

import errno
import json
import os
import sys
import time

UNDER = os.environ.get("INJECT_UNDER", "")
CONTROL = os.environ.get("INJECT_CONTROL", "")
SHORT = 1000  # bytes

real_open, real_read, real_close, real_fstat = os.open, os.read, os.close, os.fstat
real_time, real_time_ns = time.time, time.time_ns


def control():
    try:
        fd = real_open(CONTROL, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        return json.loads(real_read(fd, 4096) or b"{}")
    finally:
        real_close(fd)


def ours(where):
    return (path_of(where) if isinstance(where, int) else os.fspath(where)).startswith(UNDER)


def path_of(fd):
    if sys.platform == "darwin":
        import fcntl

        return fcntl.fcntl(fd, 50, bytes(1024)).partition(b"\0")[0].decode()  # F_GETPATH
    return os.readlink(f"/proc/self/fd/{fd}")


def inject(name):
    real = getattr(os, name)

    def call(*args, **kwargs):
        fault = control().get(name)
        if fault and args and ours(args[0]) and (name != "open" or args[1] & os.O_CREAT):
            if isinstance(fault, float):
                time.sleep(fault)
                return real(*args, **kwargs)
            if fault != "short":
                raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), str(args[0]))
            if name == "pwrite":
                return real(args[0], args[1][:SHORT], args[2])
            if name == "pread":
                return real(args[0], min(args[1], SHORT), args[2])
            if name == "preadv":
                return real(args[0], [memoryview(args[1][0])[:SHORT]], args[2])
        return real(*args, **kwargs)

    setattr(os, name, call)


if CONTROL:
    for function in ("open", "pread", "preadv", "pwrite", "ftruncate", "fsync", "rename", "mkdir", "unlink", "utime", "scandir"):
        inject(function)
    time.time = lambda: real_time() + control().get("time", 0)
    time.time_ns = lambda: real_time_ns() + int(control().get("time", 0)) * 10**9
