# syntax=docker/dockerfile:1
# Built on and run on the same Debian: the binary finds the C library that it was linked against.
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked && cp target/release/axed /axed
# A volume takes its owner from the directory that it covers.
RUN mkdir /data

# Not the image for static binaries: resolving names with a static glibc is not reliable, and name resolution is all
# that stands between a daemon and its providers. This one has glibc, libgcc and the CA certificates, and no shell.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /axed /usr/local/bin/axed
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
# Refused as it stands: beyond loopback the daemon wants keys of clients in its configuration, or --insecure-no-auth and a
# network that deserves it.
CMD ["serve"]
