# JupyterLab on the pages, with the embedded data: docker build -t uqlab . && docker run -p 8888:8888 uqlab
# The log shows the address with its token. No GPU; results stay in the container, or in a folder given by -v.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /package
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY notebooks notebooks
COPY figures/real figures/real
COPY data/README.md data/README.md
COPY uqlab uqlab
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[notebooks]'
RUN useradd --create-home reader
USER reader
WORKDIR /home/reader
RUN uqlab new pages
WORKDIR /home/reader/pages
EXPOSE 8888
CMD ["uqlab", "lab", "--no-browser", "--ip=0.0.0.0"]
