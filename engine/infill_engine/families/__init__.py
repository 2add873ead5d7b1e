"""Model families: each runs checkpoints of one architecture behind `infill_engine.core`."""
