"""Weights of networks that others trained on CIFAR-10, for `models.load_weights`."""

from uqlab.data.downloads import FILES, Remote, register

# Networks of Y. Idelbayev; a file's name holds the first eight digits of its checksum.
register(
    "resnet_cifar10",
    [
        "https://raw.githubusercontent.com/akamaster/pytorch_resnet_cifar10/"
        "d5489e8995e81e91ce6b1d69dcc98ad579b0b153/pretrained_models/"
    ],
    {
        "resnet20-12fca82f.th": (
            "sha256:12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8"
        ),
        "resnet32-d509ac18.th": (
            "sha256:d509ac1820d7f25398913559d7e81a13229b1e7adc5648e3bfa5e22dc137f850"
        ),
        "resnet44-014dd654.th": (
            "sha256:014dd6541728a1c700b1642ab640e211dc6eb8ed507d70697458dc8f8a0ae2e4"
        ),
        "resnet56-4bfd9763.th": (
            "sha256:4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367"
        ),
    },
    also=["."],
)

# Five ResNet-20 trained alike; the checksums are those of the files at this commit,
# none are published.
RUNS = (
    "https://raw.githubusercontent.com/DanSun18/pytorch_resnet_cifar10/"
    "b3e085b7539af6d46a00868869dfbee55c373c10/experiments/run_8/"
    "run_run_8-{}/save_resnet20/checkpoint.th"
)
CHECKSUMS = (
    "3f947ad5e274bad92b8977cf625cb75294abbdb6b6fa7ee992640705f9cd48e8",
    "7b6496a38166953ce3a8ed0c50204868c4838cf361d0d30c9b4dc87f08d45be9",
    "5c199a3694bc0c17bf81f9ff604ac1c0ccc3439f74a8574b28a358e25f8eace8",
    "764b3d9570dc0e741d04842eba4b174496b6b0350cc446e440b337cd3a4f19df",
    "3970e36192ae583f4eacc97f6d9d148c82a3d02c21131a7f6ca21af8a22aae66",
)
for number, checksum in enumerate(CHECKSUMS, start=1):
    name = f"ensemble_resnet20_{number}.th"
    urls = (RUNS.format(number),)
    FILES[f"resnet_cifar10/{name}"] = Remote(f"sha256:{checksum}", urls, (name,))
