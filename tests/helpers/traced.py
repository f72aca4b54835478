"""Memory that Python allocates in a call, without what other threads of the tests allocate meanwhile."""

import multiprocessing
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection


def traced_peak(call: Callable[[], object]) -> int:
    """Bytes that `call` allocates at its peak. A forked process calls it, which has none of this one's other threads.

    An error of `call` fails the test: the process prints it.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_peak, args=(call, sender))
    child.start()
    child.join()
    assert child.exitcode == 0
    peak: int = receiver.recv()
    return peak


def _send_peak(call: Callable[[], object], sender: Connection) -> None:
    tracemalloc.start()
    call()
    sender.send(tracemalloc.get_traced_memory()[1])
