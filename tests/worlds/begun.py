"""``python -IS begun.py ADDRESS ...`` is what ``python ...`` is, but forked from the process at ADDRESS (`programs`).

It imports next to nothing, hands its standard files over, passes signals on, and ends as the program does. Whoever
kills it kills the program too, which may be there for a moment longer.
"""

import marshal
import os
import sys
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGKILL, SIGTERM, getsignal, set_wakeup_fd, signal
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket
from select import POLLIN, poll

PASSED_ON = (SIGINT, SIGTERM)
LARGEST = 1 << 17  # bytes of what a program is told, its variables among it
REFUSED = b"refused"  # by who has imported with other settings than these


def main(address, *arguments):  # untyped: to import `typing` would take as long as all the rest
    server = socket(AF_UNIX, SOCK_SEQPACKET)
    server.connect(address)
    ignored = [number for number in PASSED_ON if getsignal(number) == SIG_IGN]
    told = {"arguments": arguments, "folder": os.getcwd(), "environ": dict(os.environ), "ignored": ignored}
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    request = marshal.dumps(told)
    if len(request) > LARGEST:
        begin(arguments)

    server.setblocking(False)
    set_wakeup_fd(server.fileno())  # Python's own handler writes the number there, in whichever call it finds this
    for number in set(PASSED_ON).difference(ignored):
        signal(number, lambda *_: None)
    server.sendmsg([request], [(SOL_SOCKET, SCM_RIGHTS, files)])  # from now on it may be there, and be interrupted
    answered = poll()
    answered.register(server, POLLIN)
    answered.poll()
    set_wakeup_fd(-1)
    answer = server.recv(8)
    if answer == REFUSED:
        begin(arguments)
    end(int.from_bytes(answer, sys.byteorder, signed=True) if answer else -SIGKILL)


def begin(arguments):
    """Be the program by itself."""
    os.execv(sys.executable, [sys.executable, *arguments])


def end(code):
    """As a process of that exit code, or of the negative number of a signal."""
    if code < 0:
        if -code in PASSED_ON:
            signal(-code, SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
