import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "l2l_niw" / "__init__.py").read_text(encoding="utf8"))[1]
VISION = ["timm", "safetensors", "torchmetrics", "pillow"]
TORCHMETA = ["h5py", "ordered-set"]  # what torchmeta needs; itself it asks for an old torch, see README.md
EXAMPLES = ["tqdm", "matplotlib"]

setup(
    name="l2l_niw",
    version=VERSION,
    description="NIW-Meta, a hierarchical Bayesian few-shot learner, with learn2learn's API",
    long_description=(HERE / "README.md").read_text(encoding="utf8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["l2l_niw", "l2l_niw.*"]),
    entry_points={"console_scripts": ["l2l-niw = l2l_niw.cli:main"]},
    package_data={"l2l_niw": ["py.typed"]},
    python_requires=">=3.9",
    # gym: newer ones break learn2learn's environments (0.24 asserts, 0.25 hangs, 0.26 steps return 5 values)
    install_requires=["torch>=2.1", "numpy", "learn2learn>=0.2.0", "gym==0.23.1"],
    extras_require={
        "vision": VISION,
        "examples": EXAMPLES,
        "torchmeta": TORCHMETA,
        "dev": ["pytest", "hypothesis", "scipy", "scikit-learn", "ruff", *TORCHMETA, *VISION, *EXAMPLES],
    },
)
