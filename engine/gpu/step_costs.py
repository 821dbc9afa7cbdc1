"""Whether a step with prompt tokens is quicker as a captured step, which it has to be padded for.

Estimates by one H200 and its host. A slower GPU takes longer for the padding than is estimated
here; then a step is padded that would have been quicker without.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.spec import ModelSpec

_BYTES_PER_US = 4e6
_FLOPS_PER_US = 600e6
_LAUNCH_US = 15.0
"""Of the host, for a kernel that is launched by itself."""
_LAUNCHES_PER_LAYER = 9
_BUSY_HOST = 4.0
"""Times as long as a launch may take where the host has other work: 33 to 80 us were seen on two
machines."""
_TOLERANCE = 1.05
"""A captured step is taken where it is as quick: it leaves the host alone."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of the layers alone. weight_bytes: read by any step."""

    weight_bytes: int
    flops_per_token: int
    num_launches: int

    def device_us(self, num_tokens: int) -> float:
        """Microseconds of the device for a step of so many tokens."""
        products = num_tokens * self.flops_per_token / _FLOPS_PER_US
        return max(self.weight_bytes / _BYTES_PER_US, products)

    @property
    def launched_us(self) -> float:
        """Microseconds of a host without other work for launching a step kernel by kernel."""
        return self.num_launches * _LAUNCH_US

    def is_launch_bound(self, num_tokens: int) -> bool:
        """Whether launching a step of so many tokens may take a busy host as long as the device."""
        return self.device_us(num_tokens) <= self.launched_us * _BUSY_HOST

    def padding_pays(self, num_tokens: int, padded: int) -> bool:
        """Whether a captured step of `padded` tokens is as quick as launching num_tokens."""
        launched_us = max(self.device_us(num_tokens), self.launched_us)
        return self.device_us(padded) <= launched_us * _TOLERANCE


def step_costs(spec: ModelSpec, element_bytes: int) -> StepCosts:
    """Of a model whose weights have elements of so many bytes."""
    hidden = spec.hidden_size
    per_layer = hidden * (spec.qkv_size + spec.q_size + 3 * spec.intermediate_size)
    numbers = per_layer * spec.num_layers
    return StepCosts(numbers * element_bytes, 2 * numbers, spec.num_layers * _LAUNCHES_PER_LAYER)
