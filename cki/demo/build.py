"""Builds what a forward pass needs without running it: a stand-in for `cki` in `encoder.forward`."""

from __future__ import annotations

from typing import Any

import cki


class Builder:
    """Operations that are checked, planned and compiled by `cki.hold`, and not launched.

    What they return has the shape and type of the real result, and no meaning.
    """

    def embed_tokens(self, ids: Any, word_table: Any, **tables: Any) -> Any:
        """Stands for `cki.embed_tokens`."""
        cki.hold(cki.embed_tokens, ids, word_table, **tables)
        # Rows of the table serve as [batch, seq, hidden]: any memory of that shape does.
        rows = ids.shape[0] * ids.shape[1]
        return word_table[:rows].reshape(*ids.shape, word_table.shape[1])

    def layer_norm(self, x: Any, *arguments: Any, **options: Any) -> Any:
        """Stands for `cki.layer_norm`."""
        cki.hold(cki.layer_norm, x, *arguments, **options)
        return x

    def encoder_layer(self, x: Any, *arguments: Any, **options: Any) -> Any:
        """Stands for `cki.encoder_layer`."""
        cki.hold(cki.encoder_layer, x, *arguments, **options)
        return x

    def mean_pool(self, x: Any, mask: Any, **options: Any) -> Any:
        """Stands for `cki.mean_pool`."""
        cki.hold(cki.mean_pool, x, mask, **options)
        return x[:, 0]
