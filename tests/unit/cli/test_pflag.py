"""The forms of flags that kube-proxy takes."""

from __future__ import annotations

from typing import Any

import pytest

from userspace_proxy.cli.flags import FLAGS, Kind
from userspace_proxy.cli.pflag import parse
from userspace_proxy.core.config import DEFAULTS, VModule, field_at
from userspace_proxy.core.durations import Duration
from userspace_proxy.core.errors import UsageError


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {}),
        ("--config=a", {"config": "a"}),
        ("--config a", {"config": "a"}),
        ("--config=", {"config": ""}),
        ("--config=a=b", {"config": "a=b"}),
        ("--config --cleanup", {"config": "--cleanup"}),
        ("--cleanup", {"cleanup": True}),
        ("--cleanup=true", {"cleanup": True}),
        ("--cleanup=false", {"cleanup": False}),
        ("--cleanup=T --profiling=0", {"cleanup": True, "profiling": False}),
        ("-v=2", {"v": 2}),
        ("-v 2", {"v": 2}),
        ("-v2", {"v": 2}),
        ("--v=2", {"v": 2}),
        ("--v 2", {"v": 2}),
        ("-h", {"help": True}),
        ("-hv3", {"help": True, "v": 3}),
        ("-h=false", {"help": False}),
        ("--help", {"help": True}),
        ("--version", {"version": True}),
        ("--version=false", {"version": False}),
        ("--version=raw", {"version": "raw"}),
        ("--hostname_override=a", {"hostname-override": "a"}),
        ("--log_dir=a_b", {"log-dir": "a_b"}),
        ("--v=1 --v=2 -v3", {"v": 3}),
        ("--cleanup --cleanup=false", {"cleanup": False}),
        ("--config=a --", {"config": "a"}),
        ("--oom-score-adj=-999", {"oom-score-adj": -999}),
        ("--oom-score-adj -999", {"oom-score-adj": -999}),
        ("--oom-score-adj=0x10", {"oom-score-adj": 16}),
        ("--oom-score-adj=017", {"oom-score-adj": 15}),
        ("--oom-score-adj=+1_0", {"oom-score-adj": 10}),
        ("--kube-api-qps=2.5", {"kube-api-qps": 2.5}),
        ("--udp-timeout=1m30s", {"udp-timeout": Duration(90)}),
        ("--udp-timeout=0", {"udp-timeout": Duration(0)}),
        ("--dial-ladder=1s,2s", {"dial-ladder": (Duration(1), Duration(2))}),
        ("--bind-address=::", {"bind-address": "::"}),
        ("--bind-address=", {"bind-address": ""}),
        ("--healthz-bind-address=10.0.0.1", {"healthz-bind-address": "10.0.0.1"}),
        ("--healthz-bind-address=[::]:1", {"healthz-bind-address": "[::]:1"}),
        ("--metrics-bind-address=", {"metrics-bind-address": ""}),
        ("--proxy-port-range=1-2", {"proxy-port-range": "1-2"}),
        ("--nodeport-addresses=", {"nodeport-addresses": ()}),
        ("--nodeport-addresses=a,b --nodeport-addresses c", {"nodeport-addresses": ("a", "b", "c")}),
        ("--feature-gates=A=true,B=f --feature-gates=A=0", {"feature-gates": {"A": False, "B": False}}),
        (
            "--vmodule=a=1 --vmodule=b*=2,",
            {"vmodule": (VModule(file_pattern="a", verbosity=1), VModule(file_pattern="b*", verbosity=2))},
        ),
        ("--unidling=hybrid", {"unidling": "hybrid"}),
        ("--workers=auto", {"workers": "auto"}),
        ("--workers=4", {"workers": 4}),
        ("--ipvs-scheduler rr --masquerade-all", {"ipvs-scheduler": "rr", "masquerade-all": True}),
    ],
)
def test_a_flag_is_read_in_each_of_pflags_forms(line: str, values: dict[str, Any]) -> None:
    assert parse(line.split()) == values


def test_empty_arguments_are_passed_over_as_kube_proxy_does() -> None:
    assert parse(["", "--v=2", "", "--", ""]) == {"v": 2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nonsense", "unknown flag: --nonsense"),
        ("--bind-adress=::", "unknown flag: --bind-adress; did you mean --bind-address?"),
        ("--hostname_overide=x", "unknown flag: --hostname-overide; did you mean --hostname-override?"),
        ("---v", "bad flag syntax: ---v"),
        ("--=x", "bad flag syntax: --=x"),
        ("-x", "unknown shorthand flag: 'x' in -x"),
        ("-hx", "unknown shorthand flag: 'x' in -hx"),
        ("-config=x", "unknown shorthand flag: 'c' in -config=x; with two dashes: --config"),
        ("--config", "flag needs an argument: --config"),
        ("-v", "flag needs an argument: 'v' in -v"),
        ("word", '"userspace-proxy" does not take any arguments, got ["word"]'),
        ("- a --v=1 b", '"userspace-proxy" does not take any arguments, got ["-", "a", "b"]'),
        ("-- --v=1", '"userspace-proxy" does not take any arguments, got ["--v=1"]'),
        (
            "--cleanup false",
            '"userspace-proxy" does not take any arguments, got ["false"]; '
            "the value of --cleanup belongs behind a =: --cleanup=false",
        ),
        ("--cleanup=maybe", 'invalid argument "maybe" for "--cleanup" flag: it must be true or false'),
        ("-v=high", 'invalid argument "high" for "-v, --v" flag: it must be a whole number'),
        ("--v=-1", 'invalid argument "-1" for "-v, --v" flag: it must not be negative'),
        ("--oom-score-adj=", 'invalid argument "" for "--oom-score-adj" flag: it must be a whole number'),
        ("--oom-score-adj=0x", 'invalid argument "0x" for "--oom-score-adj" flag: it must be a whole number'),
        ("--oom-score-adj=089", 'invalid argument "089" for "--oom-score-adj" flag: it must be a whole number'),
        ("--oom-score-adj=--1", 'invalid argument "--1" for "--oom-score-adj" flag: it must be a whole number'),
        ("--oom-score-adj=2147483648", 'invalid argument "2147483648" for "--oom-score-adj" flag: it must fit in 32'),
        ("--kube-api-qps=x", 'invalid argument "x" for "--kube-api-qps" flag: it must be a number'),
        ("--kube-api-qps=nan", 'invalid argument "nan" for "--kube-api-qps" flag: it must be a finite number'),
        ("--udp-timeout=5", 'invalid argument "5" for "--udp-timeout" flag: \'5\' is not a duration such as'),
        ("--bind-address=host", 'invalid argument "host" for "--bind-address" flag: it must be an IP address'),
        ("--healthz-bind-address=host:1", "flag: must be a valid IP, or an IP address alone"),
        ("--healthz-bind-address=:1", "flag: must be a valid IP, or an IP address alone"),
        ("--proxy-port-range=2-1", "flag: end port cannot be less than start port"),
        ("--feature-gates=A", "flag: A is not of the form name=true or name=false"),
        ("--vmodule=a", "flag: a is not of the form pattern=level"),
        ("--unidling=maybe", "flag: it must be one of off, on, hybrid"),
        ("--workers=many", "flag: it must be a whole number, or auto"),
    ],
)
def test_what_cannot_be_understood_is_named(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    assert message in str(caught.value)


KLOG = (
    "--logtostderr=true --alsologtostderr --log-dir=/tmp --log-file=x --log-file-max-size=1800 --stderrthreshold=2 "
    "--vmodule=proxier=4 --skip-headers --add-dir-header --one-output --log-backtrace-at=:0 --skip-log-headers "
    "--log-flush-frequency=5s --logging-format=text --log-json-info-buffer-size=0 --log-json-split-stream=false"
)


def test_the_flags_of_klog_in_1_25_are_taken_in_both_spellings() -> None:
    arguments = KLOG.split()
    assert len(parse(arguments)) == len(arguments)
    underscored = ["--" + argument[2:].partition("=")[0].replace("-", "_") for argument in arguments]
    with_values = [name + argument[len(name) :] for name, argument in zip(underscored, arguments, strict=True)]
    assert parse(with_values) == parse(arguments)


def test_every_flag_that_sets_a_field_has_a_default_of_the_kind_that_it_reads() -> None:
    for flag in FLAGS.values():
        if not flag.path:
            continue
        default = field_at(DEFAULTS, flag.path)
        if flag.kind in (Kind.LIST, Kind.GATES, Kind.LEVELS):
            continue
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        (value,) = parse([f"{flag.spelled}={text}"]).values()
        assert value == default, flag.name
