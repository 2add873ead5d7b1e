"""pygls' message loop with our documents and notebooks in place of its own, and without internals in its answers.

Knows which message says what of a document, and how an answer may fail; what a request means is its handler's.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInternalError, JsonRpcInvalidParams
from pygls.protocol import LanguageServerProtocol, lsp_method

if TYPE_CHECKING:
    from infill_lsp.server import InfillServer


class Messages(LanguageServerProtocol):
    """pygls' protocol with our documents in place of its own, and without internals in its answers."""

    _server: InfillServer

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        self._server.open_document(params.text_document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        self._server.change_document(params)

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self._server.close_document(params.text_document.uri)

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_OPEN)
    def lsp_notebook_document__did_open(self, params: types.DidOpenNotebookDocumentParams) -> None:
        for item in params.cell_text_documents:
            self._server.open_document(item)
        self._server.notebooks.open(params.notebook_document)

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_CHANGE)
    def lsp_notebook_document__did_change(self, params: types.DidChangeNotebookDocumentParams) -> None:
        self._server.change_notebook(params.notebook_document.uri, params.change)

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_CLOSE)
    def lsp_notebook_document__did_close(self, params: types.DidCloseNotebookDocumentParams) -> None:
        told = [document.uri for document in params.cell_text_documents]
        for uri in {*self._server.notebooks.close(params.notebook_document.uri), *told}:
            self._server.close_document(uri)

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_SAVE)
    def lsp_notebook_document__did_save(self, params: types.DidSaveNotebookDocumentParams) -> None:
        pass

    @lsp_method(types.WORKSPACE_EXECUTE_COMMAND)
    async def lsp_workspace__execute_command(  # type: ignore[override]
        self, params: types.ExecuteCommandParams
    ) -> Any:
        """pygls' own cannot be cancelled, and answers arguments that do not fit with a Python signature."""
        handler = self.fm.commands.get(params.command)
        if handler is None:
            raise JsonRpcInvalidParams(f"no command {params.command}")
        result = handler(*(params.arguments or ()))
        return await result if inspect.isawaitable(result) else result

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Answers a request whose parameters do not fit: pygls drops it, and the editor would wait."""
        if "jsonrpc" in data and "method" in data and self.get_message_type(data["method"]) is None:
            data.setdefault("params", None)  # pygls insists on the key in methods that it does not know.
        try:
            return super().structure_message(data)
        except JsonRpcException:
            if "id" in data and "method" in data:
                message = f"{data['method']}: the parameters do not fit the protocol"
                error = types.ResponseError(JsonRpcInvalidParams.CODE, message)
                self._send_response(data["id"], error=error)
            raise

    def _send_response(self, msg_id: str | int, result: Any = None, error: types.ResponseError | None = None) -> None:
        """Every answer goes through here. pygls' errors carry tracebacks, which belong in the log."""
        if error is not None:
            internal = error.code == JsonRpcInternalError.CODE
            message = "a fault in infill-lsp: see its log" if internal else error.message
            error = types.ResponseError(error.code, message)
        super()._send_response(msg_id, result, error)
