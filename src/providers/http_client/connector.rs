//! Opens connections to one service: directly, or through the proxy that the environment names for it (`HTTPS_PROXY`,
//! `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`).

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::Verifier;
use tokio::net::TcpStream;
use tower::Service;

use crate::providers::setup_error::SetupError;

/// For name, TCP, proxy and TLS together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For the TCP connection, divided among the addresses of a name. Longer, so that a single address never reaches it.
const TCP_CONNECT_TIMEOUT: Duration = Duration::from_secs(11);
/// How soon a peer that is gone without a word is noticed, while nothing is sent.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_RETRIES: u32 = 3;
/// How long sent data may stay unacknowledged.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(30);

type BoxError = Box<dyn Error + Send + Sync>;
type Direct = HttpsConnector<HttpConnector>;
type DirectStream = MaybeHttpsStream<TokioIo<TcpStream>>;

#[derive(Clone)]
pub struct Connector {
    route: Route,
}

#[derive(Clone)]
enum Route {
    Direct(Direct),
    /// The proxy gets each request with its whole URL.
    Forward {
        connector: Direct,
        proxy: Uri,
    },
    /// The proxy passes bytes on, after an HTTP `CONNECT`.
    Tunnel(HttpsConnector<Tunnel<Direct>>),
}

/// The proxy on the way to a service.
#[derive(Clone)]
pub struct Proxy {
    /// `host:port`
    pub authority: String,
    /// `Proxy-Authorization`, if it requires that of each request.
    pub authorization: Option<HeaderValue>,
}

impl Connector {
    /// For the service at `uri`, with the proxy on the way.
    pub fn new(uri: &Uri, is_loopback: bool) -> Result<(Self, Option<Proxy>), SetupError> {
        let proxy = match is_loopback {
            true => None,
            false => Matcher::from_system().intercept(uri),
        };
        let is_https = uri.scheme() == Some(&http::uri::Scheme::HTTPS);
        let Some(proxy) = proxy else {
            let tls = service_tls(tls_config(is_https)?);
            let route = Route::Direct(HttpsConnector::from((tcp_connector(), tls)));
            return Ok((Self { route }, None));
        };
        let is_https_proxy = match proxy.uri().scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(SetupError::Proxy),
        };
        let tls = tls_config(is_https || is_https_proxy)?;
        let connector = HttpsConnector::from((tcp_connector(), tls.clone()));
        let authority = proxy.uri().authority();
        let authority = authority.map(|it| match it.port() {
            Some(port) => format!("{}:{port}", it.host()),
            None => it.host().to_owned(),
        });
        let authority = authority.unwrap_or_default();
        let (route, authorization) = match is_https {
            true => {
                let tunnel = (tunnel(&proxy, connector), service_tls(tls));
                (Route::Tunnel(HttpsConnector::from(tunnel)), None)
            }
            false => {
                let authorization = proxy.basic_auth().cloned();
                let proxy = proxy.uri().clone();
                (Route::Forward { connector, proxy }, authorization)
            }
        };
        let proxy = Proxy {
            authority,
            authorization,
        };
        Ok((Self { route }, Some(proxy)))
    }

    async fn connect(mut self, uri: Uri) -> Result<ServiceStream, BoxError> {
        Ok(match &mut self.route {
            Route::Direct(connector) => ServiceStream::Direct(connector.call(uri).await?),
            Route::Forward { connector, proxy } => {
                ServiceStream::Forward(connector.call(proxy.clone()).await?)
            }
            Route::Tunnel(connector) => ServiceStream::Tunnel(Box::new(connector.call(uri).await?)),
        })
    }
}

fn tcp_connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    // TLS is added around it.
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(TCP_CONNECT_TIMEOUT));
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(KEEPALIVE));
    connector.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(USER_TIMEOUT));
    connector
}

fn tunnel(proxy: &Intercept, connector: Direct) -> Tunnel<Direct> {
    let tunnel = Tunnel::new(proxy.uri().clone(), connector);
    match proxy.basic_auth() {
        Some(authorization) => tunnel.with_auth(authorization.clone()),
        None => tunnel,
    }
}

/// With HTTP/2, all requests would share one connection and wait for a free stream.
fn service_tls(mut tls: ClientConfig) -> ClientConfig {
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tls
}

/// Without TLS the system's certificates, which are slow to load, are not needed.
fn tls_config(is_needed: bool) -> Result<ClientConfig, SetupError> {
    let failed = |error: rustls::Error| SetupError::HttpClient {
        cause: error.to_string(),
    };
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(failed)?;
    let builder = match is_needed {
        true => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Verifier::new(provider).map_err(failed)?)),
        false => builder.with_root_certificates(RootCertStore::empty()),
    };
    Ok(builder.with_no_client_auth())
}

impl Service<Uri> for Connector {
    type Response = ServiceStream;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<ServiceStream, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            let Ok(stream) = tokio::time::timeout(CONNECT_TIMEOUT, connector.connect(uri)).await
            else {
                let message = format!("no connection within {}s", CONNECT_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, message).into());
            };
            stream
        })
    }
}

pub enum ServiceStream {
    Direct(DirectStream),
    Forward(DirectStream),
    /// Boxed because it is rare and larger.
    Tunnel(Box<MaybeHttpsStream<DirectStream>>),
}

impl Connection for ServiceStream {
    fn connected(&self) -> Connected {
        match self {
            Self::Direct(stream) => stream.connected(),
            Self::Forward(stream) => stream.connected().proxy(true),
            Self::Tunnel(stream) => stream.connected(),
        }
    }
}

impl Read for ServiceStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Direct(stream) | Self::Forward(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tunnel(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl Write for ServiceStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Direct(stream) | Self::Forward(stream) => Pin::new(stream).poll_write(cx, data),
            Self::Tunnel(stream) => Pin::new(stream).poll_write(cx, data),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Direct(stream) | Self::Forward(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tunnel(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Direct(stream) | Self::Forward(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tunnel(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Direct(stream) | Self::Forward(stream) => stream.is_write_vectored(),
            Self::Tunnel(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Direct(stream) | Self::Forward(stream) => {
                Pin::new(stream).poll_write_vectored(cx, data)
            }
            Self::Tunnel(stream) => Pin::new(stream).poll_write_vectored(cx, data),
        }
    }
}
