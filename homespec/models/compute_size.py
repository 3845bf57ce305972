"""The size of llama.cpp's compute buffers: the intermediate results of one pass.

llama.cpp builds the graph of a whole batch and packs the results that live at the same time. The
most of them live in one of four phases; widths are of float rows, one for each token of the batch:

- attention: three of the hidden state's width, two of the queries' and, without flash attention,
  heads x cells for the scores; with it, on some devices, f16 copies of keys and values;
- feed-forward: three of its width (up, gate, their product) and four of the hidden state's;
- experts: the outputs of all that are used, twice, their width once, three hidden states;
- recurrent: three of the convolution's input and three hidden states, or six of the inner width
  and one, and a copy of the state for each snapshot.

The masks lie beside them: 2 bytes for each token of the batch and cell of the cache, 4 without
flash attention. The logits come last, when the rest has been freed.
"""

from __future__ import annotations

from homespec.models.model_shape import ModelShape
from homespec.models.placement import ContextSettings, Placement

_FLOAT = 4
_F16 = 2
_MASK = 2
_INDEX = 8  # where each token's values go, by element when they are stored transposed
_PIPELINE_COPIES = 4  # of a pass's inputs, where several devices work on several passes at once
_OFFLOADED_BATCH = 32  # from so many tokens on a device multiplies weights that lie in RAM


def compute_bytes(
    shape: ModelShape, settings: ContextSettings, placement: Placement, ram: str
) -> dict[str, int]:
    """The compute buffers by place: in RAM, named `ram`, and on each device with layers."""
    devices = placement.devices
    whole = placement.gpu_layers == len(placement.layers)
    inputs = _inputs(shape, settings)
    state = settings.batch * shape.embedding_width * _FLOAT
    layers, logits = inputs + _layer_phases(shape, settings), _logits(shape, settings)
    attention = inputs + _attention(shape, settings) + _f16_copies(shape, settings)
    last = placement.layers[-1]
    sizes = {ram: inputs + 2 * state}
    if not whole:
        most = layers if last else max(layers, logits)
        sizes[ram] = most + work_bytes(shape, settings)
    for device in devices:
        has_layers = device in placement.layers[:-1]
        most = max(layers, attention * device.f16_attention)
        sizes[device.name] = max(most * has_layers, logits * (device == last))
    if whole and len(devices) > 1:
        extra = (_PIPELINE_COPIES - 1) * inputs + 2 * _PIPELINE_COPIES * state
        sizes = {name: size + extra for name, size in sizes.items()}
    if devices and not whole and settings.batch >= _OFFLOADED_BATCH:
        sizes[devices[0].name] += _largest_in_ram(shape, placement)
    return sizes


def _layer_phases(shape: ModelShape, settings: ContextSettings) -> int:
    """The bytes of the fullest phase of a layer, without the masks."""
    width = shape.embedding_width
    phases = [3 * shape.feed_forward_width + 4 * width]
    if shape.experts_used:
        inner = shape.expert_width * shape.experts_used
        phases.append(2 * width * shape.experts_used + inner + 3 * width)
        phases.append(3 * inner + 5 * width)
    size = max(_attention(shape, settings), max(phases) * settings.batch * _FLOAT)
    if shape.recurrent:
        size = max(size, _recurrent_phase(shape, settings))
    return size


def _attention(shape: ModelShape, settings: ContextSettings) -> int:
    width = 3 * shape.embedding_width + 2 * shape.query_width
    if not settings.uses_flash_attention:
        width += shape.heads * settings.cells
    return width * settings.batch * _FLOAT


def _f16_copies(shape: ModelShape, settings: ContextSettings) -> int:
    """Keys and values of the widest layer, where the cache holds them in another type."""
    if not settings.uses_flash_attention:
        return 0
    keys = max((layer.key_width for layer in shape.layers), default=0)
    values = max((layer.value_width for layer in shape.layers), default=0)
    width = keys * (settings.cache_type_k != "f16") + values * (settings.cache_type_v != "f16")
    return settings.cells * width * _F16


def _recurrent_phase(shape: ModelShape, settings: ContextSettings) -> int:
    width = max(3 * shape.conv_width + 3 * shape.embedding_width, 6 * shape.inner_width)
    states = shape.snapshots(settings.snapshots) * (shape.state_elements + shape.conv_state_width)
    return (width * settings.batch + states) * _FLOAT


def _inputs(shape: ModelShape, settings: ContextSettings) -> int:
    """The masks and, without flash attention, the places that values go to."""
    values = max((layer.value_width for layer in shape.layers), default=0)
    if not any(layer.key_width for layer in shape.layers):
        return 0
    if settings.uses_flash_attention:
        return shape.mask_count * settings.cells * settings.batch * _MASK
    row = settings.cells * _FLOAT + values * _INDEX
    return shape.mask_count * settings.batch * row


def _logits(shape: ModelShape, settings: ContextSettings) -> int:
    rows = settings.rows * shape.vocabulary
    return (rows + settings.batch * shape.embedding_width) * _FLOAT


def work_bytes(shape: ModelShape, settings: ContextSettings) -> int:
    """The CPU's work space: a batch of a matrix's inputs in the type it is multiplied in."""
    width = max(shape.feed_forward_width, shape.query_width, shape.embedding_width)
    return settings.batch * width * 9 // 8  # Q8_0 and Q8_K take 8.5 to 9.1 bits


def _largest_in_ram(shape: ModelShape, placement: Placement) -> int:
    sizes = [
        tensor.n_bytes
        for layer, device in zip(shape.layers, placement.layers, strict=False)
        if device is None
        for tensor in layer.tensors
    ]
    return max(sizes, default=0)
