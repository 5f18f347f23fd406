"""Warnings about what happens again and again."""

from __future__ import annotations

import logging

import pytest

from userspace_proxy.dataplane.complaint import Complaint


def test_a_line_every_ten_seconds_at_most_says_how_often_it_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    complaint = Complaint(logging.getLogger("userspace_proxy.test"))
    for now in (100.0, 101.0, 109.9, 110.0, 115.0, 130.0, 150.0):
        complaint.say(f"at {now:g}", now=now)
    assert [record.getMessage() for record in caplog.records] == [
        "at 100",
        "at 110 (2 times more since the last such line)",
        "at 130 (1 times more since the last such line)",
        "at 150",
    ]
