"""The doctor: why nodes do not meet.

:mod:`~potluck.doctor.look` gathers facts and probes the network once; every check in
:mod:`~potluck.doctor.checks` is a function that turns them into findings, without touching the
network again.
"""
