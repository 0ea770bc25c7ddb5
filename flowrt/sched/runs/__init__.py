"""Runs of trainers as the nodes carry them on by themselves: replicas, parameter servers, and a coordinator on one.

Law: a run is begun by its client and known by a random number. From then on its *drivers*,
plain objects told of each message by a callback of the loop, post messages to one another;
nobody waits for anybody, and a message of a run that is not known here changes nothing.
What counts is decided by the pure values (`sched.versions.coordinator`, `sched.versions.shard`); drivers
compute, average, apply and post as those say. Every message may come twice or not at all:
who learns that the way to a peer broke posts again what still matters there.
"""
