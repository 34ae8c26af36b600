"""Find devices of the catalogue by the names that people type, and the coefficients of an engine on a device."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeVar

from powerband import catalog, engines
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.device import Device
from powerband.core.document import Document
from powerband.core.host import Host
from powerband.errors import InputError
from powerband.plan import local_device
from powerband.store import documents


@cache
def device(name: str) -> Device:
    """Return a device of the catalogue by its name or an alias; case, dashes and the vendor's name do not matter."""
    if name in catalog.names("device"):
        return _read(Device, name)
    spellings, key = _device_spellings(), _normalized(name)
    if key in spellings:
        return device(spellings[key])
    near = difflib.get_close_matches(key, spellings, n=1)
    suggestion = f" Did you mean '{spellings[near[0]]}'?" if near else ""
    raise InputError(
        f"there is no device '{name}' in the catalogue.{suggestion}",
        hint="list them with 'powerband list devices'",
    )


@cache
def _device_spellings() -> dict[str, str]:
    """Return the device of every normalized name, alias and driver name, with and without its vendor."""
    found = {}
    for name in catalog.names("device"):
        one = device(name)
        for spelling in (name, *one.aliases, *one.driver_names):
            key = _normalized(spelling).removeprefix(one.vendor)
            found[key] = found[one.vendor + key] = name
    return found


def _normalized(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def this_machine(host: Host) -> tuple[Device, int]:
    """Return this machine as a device of the catalogue or as a CPU, and the number of such devices."""
    return local_device.this_machine(host, [device(name) for name in catalog.names("device")])


def coefficients(calibrated: Sequence[Coefficients] = ()) -> list[Coefficients]:
    """Return all fitted coefficients, this machine's first."""
    return [*calibrated, *(_read(Coefficients, name) for name in catalog.names("coefficients"))]


def coefficients_for(known: Iterable[Coefficients], engine: str, on: Device, scheme: str | None) -> Coefficients:
    """Return the coefficients for an engine on a device: those of the device and scheme, or else the closest."""
    same_engine = [one for one in known if one.engine == engine]
    for key in (on.name, on.vendor):
        near = [one for one in same_engine if key in one.devices]
        near.sort(key=lambda one: (one.scheme != scheme, one.scheme is not None))
        if near and key == on.name:
            exact = near[0].scheme in (None, scheme)
            return near[0] if exact else _less_certain(near[0], f"measured with {near[0].scheme} weights")
        if near:
            return _less_certain(near[0], "none of them on this device")
    scheduling = engines.get(engine).scheduling
    return Coefficients(
        name="datasheet",
        engine=engine,
        separate_prefill_decode=scheduling is not None and scheduling.separate_prefill_decode,
        source="the datasheet only, without measurements",
    )


def _less_certain(one: Coefficients, because: str) -> Coefficients:
    """Widen the spreads of coefficients that were measured on another device or with another scheme."""

    def widened(spread: Spread) -> Spread:
        return spread.model_copy(update={"low": spread.low**2, "high": spread.high**2})

    update = {"ttft": widened(one.ttft), "tpot": widened(one.tpot), "source": f"{one.source}, {because}"}
    return one.model_copy(update=update)


D = TypeVar("D", Device, Coefficients)


def _read(kind: type[D], name: str) -> D:
    document = _document(kind.kind, name)
    assert isinstance(document, kind)
    return document


@cache
def _document(kind: str, name: str) -> Document:
    return documents.parse(catalog.text(kind, name), source=name)
