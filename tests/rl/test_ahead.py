import threading

import pytest

from cloudsched.rl.ahead import ahead


def test_items_come_in_order_and_are_made_before_they_are_asked_for():
    made, is_far = [], threading.Event()

    def source():
        for i in range(10):
            made.append(i)
            if len(made) == 5:  # one was taken, three wait, one is in the thread's hand
                is_far.set()
            yield i

    items = ahead(source(), 3)
    assert next(items) == 0
    assert is_far.wait(timeout=30)
    assert len(made) == 5
    assert list(items) == list(range(1, 10))


def test_what_the_source_raises_is_raised_after_what_it_made():
    def source():
        yield 1
        raise ValueError("no more")

    items = ahead(source(), 3)
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        next(items)


def test_closing_ends_the_thread_and_closes_the_source():
    is_closed = threading.Event()

    def source():
        try:
            while True:
                yield threading.current_thread()
        finally:
            is_closed.set()

    items = ahead(source(), 2)
    thread = next(items)
    assert thread is not threading.current_thread()
    items.close()
    assert is_closed.is_set()
    assert not thread.is_alive()
