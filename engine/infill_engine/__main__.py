"""`python -m infill_engine` is `infill-engine`."""

from infill_engine.cli import main

raise SystemExit(main())
