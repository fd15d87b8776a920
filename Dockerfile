# syntax=docker/dockerfile:1
# Two images: the default one has the daemon and nothing else; `docker build --target full .` adds Node, Python and git for MCP
# servers and commands. tests/dockerfile.sh performs these steps without a container engine.
#
# Built on and run on the same Debian: the binary finds the C library that it was linked against.
FROM rust:1-bookworm AS build
# dev builds faster, for a trial; optimized takes twice as long as release, for less processor time (deploy/optimized.sh).
ARG PROFILE=release
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    if [ "$PROFILE" = optimized ]; then mkdir -p /out/bin && deploy/optimized.sh --out /out/bin/axed; \
    else cargo install --path . --locked --profile "$PROFILE" --root /out; fi
# A volume takes its owner from the directory that it covers.
RUN mkdir /data

FROM node:22-bookworm-slim AS full
# uvx runs MCP servers that are published for Python, as npx does for Node.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir uv \
    && ln -s /opt/uv/bin/uv /opt/uv/bin/uvx /usr/local/bin/ \
    && groupadd --gid 65532 nonroot \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp nonroot
COPY --from=build /out/bin/axed /usr/local/bin/axed
COPY --from=build --chown=65532:65532 /data /data
WORKDIR /axed
COPY agents agents
COPY config config
# npx and uvx keep what they download below HOME, which has to be writable.
ENV AXED_DATA__DIR=/data \
    AXED_SERVER__LISTEN=0.0.0.0:8080 \
    HOME=/tmp
USER 65532:65532
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["/usr/local/bin/axed", "health"]
ENTRYPOINT ["/usr/local/bin/axed"]
CMD ["serve"]

# Not the image for static binaries, because this binary is not one. It has glibc, libgcc and the CA certificates, and no
# shell.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /out/bin/axed /usr/local/bin/axed
COPY --from=build --chown=65532:65532 /data /data
WORKDIR /axed
COPY agents agents
COPY config config
ENV AXED_DATA__DIR=/data \
    AXED_SERVER__LISTEN=0.0.0.0:8080
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["/usr/local/bin/axed", "health"]
ENTRYPOINT ["/usr/local/bin/axed"]
# Exits with an error unless keys of clients are configured; --insecure-no-auth is for private networks.
CMD ["serve"]
