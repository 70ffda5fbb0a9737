"""Synthetic clicks to recommend by: popular and rare rows, and labels that a model can learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Clicks:
    """A stream of batches, the same for the same arguments; every call of `batch` draws the next samples.

    A sample names `hots` rows of each table. Row k is drawn with a probability in proportion to 1 / (k + 1) ** alpha
    (Zipf): a few rows are in most samples, most rows in few. The label is drawn from a hidden logistic model of the
    dense features and of the rows, so no model's loss can reach 0.

    Args:
        tables: number of sparse features, each with a table of its own.
        rows: number of rows of a table.
        hots: number of rows of each table that a sample names; one may come twice.
        dense: number of dense features.
        alpha: skew of the rows; 0: all are alike.
        seed: of the hidden model and of the samples.
    """

    def __init__(self, *, tables: int, rows: int, hots: int, dense: int, alpha: float, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        popularity = torch.arange(1, rows + 1, dtype=torch.float64).pow(-alpha)
        self._cumulative = popularity.cumsum(0) / popularity.sum()
        self._hots = hots
        # The logit's two parts have variances of 1 and about 4: most of what can be known of a click is in its rows.
        self._dense_weights = F.normalize(self._normal(dense), dim=0)
        self._row_weights = self._normal(tables, rows) * (4 / (tables * hots)) ** 0.5
        # Without the mean, about half of the samples are clicks, whatever the popular rows weigh.
        self._row_weights -= (self._row_weights @ (popularity / popularity.sum()).float()).unsqueeze(1)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the next `size` samples.

        Returns:
            dense features, float32 [size, dense], normal;
            rows, int64 [tables, size, hots];
            labels, float32 [size], 0 or 1.
        """
        tables, rows = self._row_weights.shape
        dense = self._normal(size, len(self._dense_weights))
        drawn = torch.rand(tables, size, self._hots, dtype=torch.float64, generator=self._generator)
        sparse = torch.searchsorted(self._cumulative, drawn).clamp_(max=rows - 1)  # the last sum may round below 1
        of_rows = self._row_weights.gather(1, sparse.flatten(1)).view(sparse.shape).sum(dim=(0, 2))
        click = torch.sigmoid(dense @ self._dense_weights + of_rows)
        return dense, sparse, torch.bernoulli(click, generator=self._generator)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)
