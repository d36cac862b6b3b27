"""The stores `etcd`, `etcd-v3` and `etcd-v2`: the first is one of the others, depending on the servers' API."""

from __future__ import annotations

from contextlib import AsyncExitStack

from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.etcd_http import EtcdStore, NoSuchApiError
from aelastic.rdzv.stores.etcd_v2 import EtcdV2
from aelastic.rdzv.stores.etcd_v3 import EtcdV3
from aelastic.rdzv.stores.store import Store

APIS: dict[str, type[EtcdStore]] = {"etcd-v3": EtcdV3, "etcd-v2": EtcdV2}


def etcd_store(settings: RendezvousSettings, run_id: str) -> Store:
    """Returns the cell of one run id in an etcd cluster.

    Args:
        settings: `backend`, `endpoint`, `lease_s`, and those of `config` that `etcd_settings.py` lists.
        run_id: any text.

    Raises:
        InputError: a setting cannot work.
    """
    api = APIS.get(settings.backend)
    return EitherEtcd(settings, run_id) if api is None else api(settings, run_id)


class EitherEtcd(Store):
    """The cell, through v3 if the servers have it; they are asked once."""

    def __init__(self, settings: RendezvousSettings, run_id: str) -> None:
        self._stores = [api(settings, run_id) for api in APIS.values()]
        self._chosen: EtcdStore | None = None

    async def get(self) -> bytes:
        return await self._chosen.get() if self._chosen is not None else await self._choose()

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        if self._chosen is None:
            await self._choose()
        assert self._chosen is not None
        return await self._chosen.compare_set(expected, new)

    async def _choose(self) -> bytes:
        """Returns the text, through the first API that answers."""
        missing: list[NoSuchApiError] = []
        for store in self._stores:
            try:
                text = await store.get()
            except NoSuchApiError as error:
                missing.append(error)
            else:
                self._chosen = store
                return text
        raise missing[0]

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:
            for store in self._stores:
                stack.push_async_callback(store.aclose)

    @property
    def _shown(self) -> EtcdStore:
        return self._chosen or self._stores[0]

    @property
    def name(self) -> str:
        return self._chosen.name if self._chosen is not None else f"etcd at {self._stores[0].at}"

    @property
    def where(self) -> str:
        return self._shown.where

    @property
    def own_address(self) -> str:
        return self._shown.own_address

    @property
    def endpoint_host(self) -> str:
        return self._shown.endpoint_host
