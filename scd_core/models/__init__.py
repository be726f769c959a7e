"""Language models: one decoder-only transformer, its cache and positions, and one short file a family."""
