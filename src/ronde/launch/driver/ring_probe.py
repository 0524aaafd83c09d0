"""Finds the address by which the other hosts of a job reach this one: the shell around `launch/driver/ring`.

Agents meet in the store of the job, under the keys `ring/HOST/offer` and `ring/HOST/verdict`. A host serves its offered
addresses until it has its verdict, which the host before it in the ring gives. `net/authenticating_listener` turns
away every other client.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Self

from ronde.errors import AuthenticationError, ProtocolError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.launch.driver.ring import TRY_NS, HostOffer, OfferedAddress, ProbeEdge, RingPlan, likely_first
from ronde.net.addresses import (
    Address,
    address_towards,
    interface_addresses,
    is_loopback,
    listen,
    parse_address,
    resolve,
)
from ronde.net.authenticating_listener import Authenticator
from ronde.net.authentication import Handshake, Protection, Role, authenticate
from ronde.net.host import host_name
from ronde.stores.tcp import StoreClient
from ronde.typed_json import TypedJson

__all__ = ["probe_ring"]


@dataclass(frozen=True)
class _Verdict:
    """The address by which a host is reached, or the problem if there is none."""

    address: str
    problem: str


_OFFER: TypedJson[HostOffer] = TypedJson(HostOffer, "offer of a ring probe")
_VERDICT: TypedJson[_Verdict] = TypedJson(_Verdict, "verdict of a ring probe")


def probe_ring(store: StoreClient, key: JobKey, plan: RingPlan, timeout_ns: int) -> str:
    """Return the numeric address by which other hosts of the job reach this one.

    The agents of all hosts must call it. `timeout_ns`: how long to wait for other hosts. Raises UsageError if this host
    cannot reach the next one, is not reached, or gets no answer in time.
    """
    deadline_ns = time.monotonic_ns() + timeout_ns
    with ExitStack() as stack:
        try:
            if plan.probes:
                listeners = stack.enter_context(
                    _RingListeners(_candidates(store, plan), key, _purpose(plan.host))
                )
                store.set(_name(plan.host, "offer"), _OFFER.encode(HostOffer(host_name(), listeners.offered)))
                _give_verdict(store, key, plan, deadline_ns)
            verdict = _VERDICT.decode(_get(store, _name(plan.host, "verdict"), deadline_ns))
        except TimeoutError:
            raise UsageError(
                f"{host_name()} waited {timeout_ns / 1e9:g} s for another host to find out its address: look for hosts "
                "that did not start, or raise the limit (--start-timeout)"
            ) from None
    if verdict.problem:
        raise UsageError(verdict.problem)
    return verdict.address


def _give_verdict(store: StoreClient, key: JobKey, plan: RingPlan, deadline_ns: int) -> None:
    """Find and tell the address of the next host. Raises UsageError if it has none."""
    offer = _OFFER.decode(_get(store, _name(plan.next_host, "offer"), deadline_ns))
    edge = _probe(offer, key, _purpose(plan.next_host))
    verdict = _Verdict(edge.address, "" if edge.address else edge.describe_failure())
    store.set(_name(plan.next_host, "verdict"), _VERDICT.encode(verdict))
    if verdict.problem:
        raise UsageError(verdict.problem)


def _name(host: int, what: str) -> str:
    return f"ring/{host}/{what}"


def _purpose(host: int) -> str:
    """Return the purpose of connections to this host's listeners, by which no other host answers for it."""
    return f"ring probe of host {host}"


def _get(store: StoreClient, name: str, deadline_ns: int) -> bytes:
    return store.get(name, max(0, deadline_ns - time.monotonic_ns()))


def _candidates(store: StoreClient, plan: RingPlan) -> list[tuple[str, str]]:
    """Return the interfaces and addresses to offer, in order. Raises UsageError if there are none."""
    towards_driver = address_towards(parse_address(store.address).host)
    found = interface_addresses()
    if not found and is_loopback(towards_driver):
        found = [("lo", towards_driver)]  # without a network, all hosts are containers of this machine
    if plan.interfaces:
        found = [each for each in found if each[0] in plan.interfaces]
    if not found:
        where = f"on {', '.join(plan.interfaces)}" if plan.interfaces else "beside loopback"
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(
            f"{host_name()} has no address {where} by which other hosts could reach it: give one of its network "
            f"interfaces ({names}) an address, or name another interface"
        )
    return likely_first(found, towards_driver)


class _RingListeners:
    """Listeners at some addresses, served by a thread until the end of a `with` block. `offered`: those that work."""

    def __init__(self, addresses: Sequence[tuple[str, str]], key: JobKey, purpose: str) -> None:
        self._stack = ExitStack()
        sockets: list[socket.socket] = []
        offered: list[OfferedAddress] = []
        for interface, host in addresses:
            with suppress(UsageError):  # the address has just gone
                listener, address = listen(Address(host=host))
                sockets.append(self._stack.enter_context(listener))
                offered.append(OfferedAddress(interface, host, address.port))
        self.offered = tuple(offered)
        self._epoll = self._stack.enter_context(select.epoll())
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._stack.callback(os.close, self._end)
        self._epoll.register(self._end, select.EPOLLIN)
        self._authenticator = Authenticator(
            sockets,
            "ring probe",
            lambda _: Handshake(Role.SERVER, key, purpose, Protection.SEALED),
            lambda _: None,  # the host before this one reports that there is no answer
            self._epoll,
        )
        self._thread = threading.Thread(target=self._serve, name="ronde-ring-probe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._authenticator.close()
        self._stack.close()

    def _serve(self) -> None:
        while True:
            wake_ns = self._authenticator.wake_ns
            wait_s = None if wake_ns is None else max(0, wake_ns - time.monotonic_ns()) / 1e9
            for fd, _ in self._epoll.poll(wait_s):
                if fd == self._end:
                    return
                if fd in self._authenticator and (caller := self._authenticator.handle_ready(fd)):
                    caller.sock.close()  # it has its answer
            self._authenticator.tick(time.monotonic_ns())


def _probe(offer: HostOffer, key: JobKey, purpose: str) -> ProbeEdge:
    """Return what connecting to all addresses at once shows."""
    edge = ProbeEdge(host_name(), offer, time.monotonic_ns())
    results: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def connect(index: int, offered: OfferedAddress) -> None:
        results.put((index, _try_address(offered, key, purpose, edge.began_ns + TRY_NS)))

    for index, offered in enumerate(offer.addresses):
        threading.Thread(target=connect, args=(index, offered), name="ronde-ring-probe", daemon=True).start()
    while not edge.is_decided and (left_ns := edge.deadline_ns - time.monotonic_ns()) > 0:
        with suppress(queue.Empty):
            index, problem = results.get(timeout=left_ns / 1e9)
            edge.note_result(index, problem, time.monotonic_ns())
    return edge


def _try_address(offered: OfferedAddress, key: JobKey, purpose: str, deadline_ns: int) -> str:
    """Return why the host does not answer there; empty if it does."""
    try:
        endpoint = resolve(Address(host=offered.address, port=offered.port))[0]
        with socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(0.001, (deadline_ns - time.monotonic_ns()) / 1e9))
            sock.connect(endpoint.sockaddr)
            authenticate(sock, Role.CLIENT, key, purpose, Protection.SEALED, deadline_ns)
    except AuthenticationError:
        return "another machine or service answers there"
    except ProtocolError as error:
        return str(error)
    except OSError as error:
        return (error.strerror or f"no answer within {TRY_NS / 1e9:g} s").lower()
    return ""
