"""Parts of the tests of families: the smallest members of torchvision's, smaller ones of the same classes, and others' ways
of writing networks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models
from torchvision.models import efficientnet, mobilenetv3, regnet, resnet, swin_transformer, vgg
from torchvision.models.convnext import CNBlockConfig

CLASSES = 5
MEMBERS: dict[str, tuple[int, dict[str, object]]] = {  # size of images, options
    "alexnet": (64, {}),
    "vgg11": (32, {}),
    "vgg11_bn": (32, {}),
    "resnet18": (32, {}),
    "wide_resnet50_2": (32, {}),
    "resnext50_32x4d": (32, {}),
    "regnet_y_400mf": (32, {}),
    "regnet_x_400mf": (32, {}),
    "densenet121": (32, {}),
    "squeezenet1_1": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "efficientnet_b0": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "convnext_tiny": (32, {}),
    "googlenet": (32, {"aux_logits": False, "init_weights": False}),
    "inception_v3": (75, {"aux_logits": False, "init_weights": False}),
    "mnasnet0_5": (32, {}),
    "swin_t": (64, {}),
    "swin_v2_t": (64, {}),
    "vit_b_32": (64, {"image_size": 64}),
    "maxvit_t": (224, {}),
}


BUILT = ("regnet", "swin", "maxvit")  # these compute what they hold; the others are filled


def member(name: str) -> nn.Module:
    """Its weights are arbitrary: to be `filled`."""
    with torch.device("cpu" if name.startswith(BUILT) else "meta"):
        network = getattr(models, name)(weights=None, num_classes=CLASSES, **MEMBERS[name][1])
    return network if name.startswith(BUILT) else network.to_empty(device="cpu")


def filled(network: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In eval mode, everything random, but for indices and coordinates; sizes of activations stay about 1."""
    generator = torch.Generator().manual_seed(seed)
    network = network.to(dtype).eval()
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0, generator=generator)
            elif not tensor.is_floating_point() or "coords" in name:
                continue
            elif tensor.ndim > 1:
                tensor.normal_(0.0, (2.0 / tensor[0].numel()) ** 0.5, generator=generator)
            elif name.endswith("weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0.0, 0.3, generator=generator)
    return network


def _swin(block: type[nn.Module], merging: type[nn.Module]) -> nn.Module:
    return models.SwinTransformer(
        [2, 2], 8, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, block=block, downsample_layer=merging
    )  # pyright: ignore[reportArgumentType]


def _vgg(norm: bool) -> nn.Module:
    network = vgg.VGG(vgg.make_layers([8, "M", 12, "M", 16, 16, "M"], norm), CLASSES, init_weights=False)
    network.classifier[0] = nn.Linear(16 * 49, 20)
    network.classifier[3] = nn.Linear(20, 20)
    network.classifier[6] = nn.Linear(20, CLASSES)
    return network


def _alexnet() -> nn.Module:
    network = models.AlexNet(CLASSES)
    network.classifier[1] = nn.Linear(256 * 36, 24)
    network.classifier[4] = nn.Linear(24, 20)
    network.classifier[6] = nn.Linear(20, CLASSES)
    return network


def _inverted(kind: str) -> nn.Module:
    if kind == "v3":
        rows = [mobilenetv3.InvertedResidualConfig(8, 3, 16, 8, True, "RE", 2, 1, 1.0),
                mobilenetv3.InvertedResidualConfig(8, 5, 24, 8, True, "HS", 1, 1, 1.0)]  # fmt: skip
        return mobilenetv3.MobileNetV3(rows, 24, num_classes=CLASSES)
    if kind == "fused":
        rows = [efficientnet.FusedMBConvConfig(2, 3, 1, 8, 8, 2), efficientnet.MBConvConfig(2, 3, 2, 8, 16, 2)]
    else:
        rows = [efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), efficientnet.MBConvConfig(6, 5, 2, 8, 16, 2)]
    return efficientnet.EfficientNet(rows, 0.1, num_classes=CLASSES)


def _regnet(squeeze: float | None) -> nn.Module:
    params = regnet.BlockParams([2, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], squeeze)
    return regnet.RegNet(params, CLASSES, stem_width=8)


SMALL: dict[str, tuple[int, Callable[[], nn.Module]]] = {  # size of images
    "alexnet": (64, _alexnet),
    "vgg": (32, lambda: _vgg(False)),
    "vgg_bn": (32, lambda: _vgg(True)),
    "resnet": (32, lambda: resnet.ResNet(resnet.BasicBlock, [1, 2, 1, 1], CLASSES)),
    "wide_resnet": (32, lambda: resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=16)),
    "resnext": (32, lambda: resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1], CLASSES, groups=4, width_per_group=8)),
    "regnet_y": (32, lambda: _regnet(0.25)),
    "regnet_x": (32, lambda: _regnet(None)),
    "densenet": (32, lambda: models.DenseNet(8, (2, 3, 2, 1), 8, 2, num_classes=CLASSES)),
    "squeezenet": (32, lambda: models.SqueezeNet("1_1", CLASSES)),
    "shufflenet": (32, lambda: models.ShuffleNetV2([2, 3, 2], [8, 16, 24, 32, 24], CLASSES)),
    "mobilenet_v2": (32, lambda: models.MobileNetV2(CLASSES, 0.25)),
    "mobilenet_v3": (32, lambda: _inverted("v3")),
    "efficientnet": (32, lambda: _inverted("")),
    "efficientnet_v2": (32, lambda: _inverted("fused")),
    "convnext": (32, lambda: models.ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], num_classes=CLASSES)),
    "googlenet": (32, lambda: models.GoogLeNet(CLASSES, aux_logits=False, init_weights=False)),
    "mnasnet": (32, lambda: models.MNASNet(0.25, CLASSES)),
    "swin": (32, lambda: _swin(swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging)),
    "swin_v2": (32, lambda: _swin(swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2)),
    "vit": (16, lambda: models.VisionTransformer(16, 8, 2, 2, 8, 12, num_classes=CLASSES)),
    "maxvit": (32, lambda: models.MaxVit((32, 32), 4, 2, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES)),
}  # fmt: skip


class Conv1(nn.Module):
    """1-D, with a functional layer and in-place forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(3, 6, 5, padding=2), nn.BatchNorm1d(6), nn.Conv1d(6, 8, 3, groups=2)
        self.weight, self.bias = nn.Parameter(torch.ones(CLASSES, 8)), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu_()
        x *= 0.5
        return F.linear(F.hardswish(self.second(x), inplace=True).mean(-1), self.weight, self.bias)


class UNet(nn.Module):
    def __init__(self, upsample: bool) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = (
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1)) if upsample else nn.ConvTranspose2d(8, 4, 2, 2)
        )
        self.join, self.norm, self.head = nn.Conv2d(10, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = torch.cat([skip, self.up(F.relu(self.middle(skip)))], dim=1)
        return self.head(F.silu(self.norm(self.join(x))))


class OwnAttention(nn.Module):
    """As many write it: one weight for queries, keys and values, heads by reshape."""

    def __init__(self, width: int, heads: int, product: str) -> None:
        super().__init__()
        self.heads, self.product = heads, product
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.product == "sdpa":
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.product == "einsum":
            x = torch.einsum("nhqk,nhkd->nhqd", torch.einsum("nhqd,nhkd->nhqk", q, k).softmax(-1), v)
        else:
            x = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.out(x.transpose(1, 2).reshape(n, length, width))


class Gpt(nn.Module):
    """Token embedding, position table, pre-norm blocks with attention and gates; takes numbers of tokens [n, length]."""

    def __init__(self, product: str = "sdpa", width: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, width), nn.Embedding(16, width)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.RMSNorm(width), nn.LayerNorm(width)
        self.attention = OwnAttention(width, 2, product)
        self.gate, self.up, self.down = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(12, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1), device=x.device)
        x = self.tokens(x) + self.places(places)
        x = x + self.attention(self.norm1(x)) * self.scale
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm3(x)[:, -1])


class Encoder(nn.Module):
    def __init__(self, first: bool, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first, norm_first=first)
        self.turned = not batch_first
        self.embed, self.encoder = nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.encoder(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.encoder(x)
        return self.head(self.cross(x[:, :1], x, x, need_weights=False)[0].flatten(1))


class Mixer(nn.Module):
    """Channels and positions mixed in turn: two sets of hidden units in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2)
        x = x + self.down(F.gelu(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2))))
        return self.head(x.mean(2))


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.up, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 1), nn.Conv2d(4, CLASSES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(F.pixel_shuffle(self.up(F.relu(self.wide(x))), 2)))


def images(size: int, count: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7)).to(dtype)


def sequences(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).double()


def tokens(count: int = 2) -> Tensor:
    return torch.randint(0, 11, (count, 6), generator=torch.Generator().manual_seed(7))


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "conv1d": (Conv1, lambda n: sequences(n, 3, 12)),
    "unet": (lambda: UNet(False), lambda n: images(8, n)),
    "unet upsampling": (lambda: UNet(True), lambda n: images(8, n)),
    "gpt sdpa": (lambda: Gpt("sdpa"), tokens),
    "gpt matmul": (lambda: Gpt("matmul"), tokens),
    "gpt einsum": (lambda: Gpt("einsum"), tokens),
    "encoder": (lambda: Encoder(False, True), lambda n: sequences(n, 5, 4)),
    "encoder, norm first": (lambda: Encoder(True, True), lambda n: sequences(n, 5, 4)),
    "encoder, length first": (lambda: Encoder(True, False), lambda n: sequences(n, 5, 4)),
    "mixer": (Mixer, lambda n: images(8, n)),
    "pixel shuffle": (SuperResolution, lambda n: images(6, n)),
}
