"""The streams go through the same proxies as in the traffic tests."""

from tests.traffic.conftest import _loops_have_run_once, stage, variant

__all__ = ["_loops_have_run_once", "stage", "variant"]
