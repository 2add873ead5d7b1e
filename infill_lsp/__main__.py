"""`python -m infill_lsp` is `infill-lsp`."""

from infill_lsp.cli import main

raise SystemExit(main())
