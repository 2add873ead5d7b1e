"""What the editor says of settings over LSP, and the files that hold them, followed while both change.

Translates between LSP and `Sources`. It does not know what a setting does: whoever made it is told when others hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer

from infill_lsp.sources import Sources

log = logging.getLogger(__name__)

#: Seconds between two looks at the files.
POLL_S = 1.0
#: Seconds that an editor may take to answer, and files to be read, before it goes on without.
PATIENCE_S = 2.0
SECTION = "infill"


class Configuration:
    """The settings of one editor. `changed` is called where others hold than before. Belongs to one event loop."""

    def __init__(self, server: LanguageServer, changed: Callable[[], Awaitable[None]]) -> None:
        self.sources = Sources()
        self._server = server
        self._changed = changed
        self._turn = asyncio.Lock()
        #: Whether the last question is answered, and how many there were.
        self._settled = asyncio.Event()
        self._asked = 0
        self._held: object = None
        self._told: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """The editor listens from now on: it is asked, and told to tell."""
        self._begin(self._register())
        await self.refresh()
        self._begin(self._follow())

    async def settled(self) -> None:
        """Waits until all that was asked has been heard: before that a document may seem to be offered what it is not,
        or the reverse. Not for long, for an editor may never say that it listens."""
        if not self._settled.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._settled.wait()
            self._settled.set()

    async def pushed(self, settings: object) -> None:
        """The editor says that its settings changed, and perhaps what they are, all of them. Those of other sections,
        or none at all, leave ours as they are."""
        if isinstance(settings, dict) and SECTION in settings:
            self.sources.push(settings[SECTION])
        await self.refresh()

    async def refresh(self) -> None:
        """Asks the editor and reads the files, of all folders that there are now."""
        self._settled.clear()
        self._asked = asked = self._asked + 1
        heard = self._begin(self._hear())
        await asyncio.wait([heard], timeout=PATIENCE_S)
        if not heard.done():
            log.warning("the settings are late: what is known of them is used until then")
            heard.add_done_callback(lambda late: None if late.cancelled() else self._begin(self._tell()))
        if asked == self._asked:
            self._settled.set()
        await self._tell()

    def news(self) -> list[str]:
        """A line for each value that is not used, each once."""
        lines = [line for line in self.sources.problems if line not in self._told]
        self._told.update(lines)
        return lines

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _folders(self) -> list[str]:
        return [folder.uri for folder in self._server.workspace.folders.values()]

    async def _hear(self) -> None:
        await asyncio.gather(self._pull(), self._look())

    async def _tell(self) -> None:
        """Says that others hold, if they do."""
        holds = (self.sources.effective(), self.sources.everywhere)
        if holds != self._held:
            self._held = holds
            await self._changed()

    async def _pull(self) -> None:
        capabilities = self._server.client_capabilities.workspace
        if capabilities is None or not capabilities.configuration:
            return
        scopes = ["", *self._folders]
        items = [types.ConfigurationItem(scope_uri=scope or None, section=SECTION) for scope in scopes]
        try:
            answers = await self._server.workspace_configuration_async(types.ConfigurationParams(items))
        except JsonRpcException as error:
            log.warning("the editor does not say its settings: %s", type(error).__name__)
            return
        self.sources.pull(dict(zip(scopes, answers, strict=False)))

    async def _look(self) -> None:
        async with self._turn:
            self.sources.take(await asyncio.to_thread(self.sources.look, self._folders))

    async def _register(self) -> None:
        """Some editors tell of changes only to those who ask for it."""
        capabilities = self._server.client_capabilities.workspace
        change = capabilities and capabilities.did_change_configuration
        if not change or not change.dynamic_registration:
            return
        method = types.WORKSPACE_DID_CHANGE_CONFIGURATION
        options = types.DidChangeConfigurationRegistrationOptions(section=SECTION)
        registration = types.Registration(id=method, method=method, register_options=options)
        try:
            await self._server.client_register_capability_async(types.RegistrationParams([registration]))
        except JsonRpcException as error:
            log.warning("the editor does not tell of changed settings: %s", type(error).__name__)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._look()
            await self._tell()

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
