"""A program, not a module: the remote shell of mpirun, which passes a command on to the driver.

    python -I -S remote_shell.py SOCKET HOST COMMAND...

The driver listens at the Unix socket, in a directory that only its user may enter. It has the command run in a task on
the host, and answers with the exit code when the command has ended.
"""

from __future__ import annotations

import json
import socket
import sys

LOST = 255  # as of ssh

if __name__ == "__main__":
    path, host, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(json.dumps([host, " ".join(command)]).encode() + b"\n")
        answer = sock.recv(16)
    sys.exit(int(answer or LOST))
