from setuptools import find_packages, setup

setup(
    name="l2l_niw",
    version="0.1.0",
    packages=find_packages(include=["l2l_niw", "l2l_niw.*"]),
    package_data={"l2l_niw": ["py.typed"]},
    python_requires=">=3.9",
    install_requires=["torch>=2.1", "numpy", "learn2learn>=0.2.0", "gym==0.23.1"],
    extras_require={
        "dev": ["pytest", "hypothesis", "scipy", "ruff", "tqdm", "matplotlib", "torchmetrics"],
    },
)
