//! What surrounds every route: marks secret headers, gives the request an id, refuses requests of foreign web pages, turns
//! a panic into a response, renders problems and writes one log line. All of it is one layer of the router, because axum
//! boxes each layer's future for each request.

use std::any::Any;
use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, ETAG, LOCATION, RETRY_AFTER};
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use futures_util::future::Either;
use tower::ServiceBuilder;
use tower_http::CompressionLevel;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{NotForContentType, Predicate, SizeAbove};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use tower_http::sensitive_headers::SetSensitiveRequestHeadersLayer;
use tracing::{debug, error, warn};

use crate::config::{AllowedOrigins, ClientKey, Cors};
use crate::domain::run::RunId;
use crate::web::error::{ErrorShape, Problem};
use crate::web::server::forwarded::{
    Client, ClientAddress, ForwardedOrigin, PeerAddress, TrustedProxies,
};
use crate::web::server::origin_guard::OriginGuard;

/// The header of a request's id, in requests and responses.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum characters of a client's request id, and of the `instance` of a problem.
const MAX_REQUEST_ID: usize = 128;
const MAX_INSTANCE: usize = 512;

/// Minimum bytes of a response that is compressed.
const MIN_COMPRESSED: u16 = 1024;

const PROVIDER_KEY: HeaderName = HeaderName::from_static("x-provider-key");

/// What one listener does with every request.
#[derive(Clone, Debug, Default)]
pub struct MiddlewareConfig {
    pub guard: OriginGuard,
    pub proxies: TrustedProxies,
    pub cors: Option<Cors>,
    /// Whether responses are compressed for clients that accept it.
    pub compression: bool,
}

/// Surrounds all routes of the router, and its fallback.
pub fn surround<S>(router: Router<S>, config: MiddlewareConfig) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let cors = config.cors.as_ref().map(cors_layer);
    let compression = compression_layer(config.compression);
    // The layer is cloned for each request.
    let config = Arc::new(config);
    let layers = ServiceBuilder::new()
        // Debug output of a request then hides the values.
        .layer(SetSensitiveRequestHeadersLayer::new([
            AUTHORIZATION,
            PROVIDER_KEY,
        ]))
        .layer(from_fn(move |request, next| {
            handle_request(&config, request, next)
        }))
        .option_layer(cors)
        .layer(compression)
        .layer(CatchPanicLayer::custom(panic_response));
    router.layer(layers)
}

/// Compresses what is worth it. An event of a stream would wait in the compressor until others fill its buffer. Problems
/// are rendered outside of this layer: they are small.
fn compression_layer(is_enabled: bool) -> CompressionLayer<impl Predicate> {
    let predicate = SizeAbove::new(MIN_COMPRESSED)
        .and(NotForContentType::const_new("text/event-stream"))
        .and(move |_: StatusCode, _: Version, _: &HeaderMap, _: &Extensions| is_enabled);
    CompressionLayer::new()
        .gzip(is_enabled)
        .quality(CompressionLevel::Fastest)
        .compress_when(predicate)
}

/// The panic's message is not sent: it may quote anything. The panic hook has logged it.
fn panic_response(_: Box<dyn Any + Send>) -> Response {
    Problem::internal("a handler panicked").into_response()
}

/// Runs the route and finishes its response.
fn handle_request(
    config: &MiddlewareConfig,
    mut request: Request,
    next: Next,
) -> impl Future<Output = Response> + use<> {
    let started = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    // A copy: the request's path is a slice of the connection's read buffer, which a waiting request must release.
    let path = shown_path(request.uri().path());

    let peer = request.extensions().get().map(|PeerAddress(peer)| *peer);
    let mut client = config.proxies.client(peer, request.headers());
    if let Some(prefix) = client.prefix.take() {
        request.extensions_mut().insert(prefix);
    }
    if client.scheme.is_some() || client.host.is_some() {
        request.extensions_mut().insert(ForwardedOrigin {
            scheme: client.scheme,
            host: client.host.clone(),
        });
    }
    if let Some(address) = client.address {
        request.extensions_mut().insert(ClientAddress(address));
    }
    let response = match config.guard.check(&request, client.host.as_ref()) {
        Err(problem) => Either::Left(ready(problem.into_response())),
        Ok(()) => Either::Right(next.run(request)),
    };
    let request = HandledRequest {
        id,
        method,
        path,
        client,
        started,
    };
    // An `async` block would have space for the request twice, and for the route's future too.
    response.map(move |response| request.finish(response))
}

/// What is known of a request when its response is finished.
struct HandledRequest {
    id: HeaderValue,
    method: Method,
    path: Box<str>,
    client: Client,
    started: Instant,
}

impl HandledRequest {
    /// Renders a problem, writes the log line and adds the id.
    fn finish(self, mut response: Response) -> Response {
        let Self {
            id,
            method,
            path,
            client,
            started,
        } = self;
        let request_id_text = id.to_str().unwrap_or_default();
        if let Some(problem) = response.extensions_mut().remove::<Problem>() {
            render(&problem, &path, request_id_text, &mut response);
            let (status, code) = (problem.status().as_u16(), problem.code());
            match problem.cause() {
                Some(cause) if status == 500 => {
                    error!(
                        request.id = request_id_text,
                        http.status = status,
                        code,
                        "{method} {path} failed: {cause}"
                    );
                }
                Some(cause) => {
                    warn!(
                        request.id = request_id_text,
                        http.status = status,
                        code,
                        "{method} {path} refused: {cause}"
                    );
                }
                None => {}
            }
        }
        let status = response.status().as_u16();
        let key = response.extensions().get::<Arc<ClientKey>>();
        debug!(
            request.id = request_id_text,
            http.method = method.as_str(),
            url.path = path,
            http.status = status,
            key = key.map(|key| key.name.as_str()),
            bytes = response.body().size_hint().exact(),
            client.address = client.address.map(display),
            url.scheme = client.scheme,
            server.address = client.host.as_ref().map(display),
            duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "{method} {path} answered {status}"
        );
        response.headers_mut().insert(REQUEST_ID, id);
        response
    }
}

/// Writes the problem into the response: as problem details, or in the shape of the route's protocol.
fn render(problem: &Problem, path: &str, request_id: &str, response: &mut Response) {
    let Some(ErrorShape(shape)) = response.extensions().get().copied() else {
        *response.body_mut() = Body::from(problem.render(path, request_id));
        return;
    };
    let error = shape(problem);
    *response.status_mut() = error.status;
    *response.body_mut() = Body::from(error.body);
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
}

/// The client's id if it has 1 to 128 visible ASCII characters, else a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    headers
        .get(REQUEST_ID)
        .map(HeaderValue::as_bytes)
        .filter(|id| {
            (1..=MAX_REQUEST_ID).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
        })
        .and_then(|id| HeaderValue::from_bytes(id).ok())
        .unwrap_or_else(new_request_id)
}

/// A new request id. It uses the UUID of a run id, because ids are generated in one place.
pub fn new_request_id() -> HeaderValue {
    HeaderValue::try_from(format!("req_{}", RunId::new().0.as_simple()))
        .unwrap_or(HeaderValue::from_static("req_0"))
}

/// The path as problems and logs show it: cut, and without the secret of a feedback link.
fn shown_path(path: &str) -> Box<str> {
    let cut = path.char_indices().nth(MAX_INSTANCE);
    let path = cut.map_or(path, |(end, _)| &path[..end]);
    match path.find(FEEDBACK_PATH) {
        Some(at) => format!("{}…", &path[..at + FEEDBACK_PATH.len()]).into(),
        None => path.into(),
    }
}

/// What the secret of a feedback link follows in a path.
const FEEDBACK_PATH: &str = "/feedback/";

/// How long a browser may keep the response to a preflight.
const PREFLIGHT_MAX_AGE: Duration = Duration::from_secs(3600);

/// The response headers that a page may read besides those that every page may.
const EXPOSED: [HeaderName; 8] = [
    LOCATION,
    RETRY_AFTER,
    ETAG,
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("idempotency-replayed"),
    HeaderName::from_static("x-run-id"),
    HeaderName::from_static("x-should-retry"),
    HeaderName::from_static("mcp-session-id"),
];

/// Answers preflights, which need no key, and lets pages of the configured origins read responses.
fn cors_layer(cors: &Cors) -> CorsLayer {
    let origins = match &cors.origins {
        AllowedOrigins::Any => AllowOrigin::any(),
        AllowedOrigins::Only(origins) => {
            let origins = origins.iter();
            AllowOrigin::list(origins.filter_map(|origin| HeaderValue::try_from(origin).ok()))
        }
    };
    CorsLayer::new()
        .allow_origin(origins)
        .allow_credentials(cors.credentials)
        .allow_methods(AllowMethods::mirror_request())
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(PREFLIGHT_MAX_AGE)
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::extract::Request;
    use axum::http::{Method, Uri};
    use axum::response::Response;
    use axum::routing::get;
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::{MiddlewareConfig, surround};
    use crate::web::error::{method_not_allowed, route_not_found};

    async fn send(request: axum::http::request::Builder) -> (Response<()>, String) {
        let router: Router = Router::new()
            .route("/fine", get(async || "fine"))
            .route("/broken", get(async || -> String { panic!("a secret") }))
            .fallback(route_not_found)
            .method_not_allowed_fallback(async |method: Method, uri: Uri| {
                method_not_allowed(&method, &uri)
            });
        let router = surround(router, MiddlewareConfig::default());
        let request = request.header("host", "localhost");
        let request: Request = request.body(Body::empty()).expect("a request");
        let response = router.oneshot(request).await.expect("an answer");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        let text = String::from_utf8(body.to_vec()).expect("UTF-8");
        (Response::from_parts(parts, ()), text)
    }

    #[tokio::test]
    async fn every_response_has_a_request_id() {
        let (response, _) = send(Request::get("/fine")).await;
        assert!(
            response.headers()["x-request-id"]
                .as_bytes()
                .starts_with(b"req_")
        );
        let (response, _) = send(Request::get("/fine").header("x-request-id", "mine-1")).await;
        assert_eq!(response.headers()["x-request-id"], "mine-1");
        for bad in [String::new(), "two words".into(), "x".repeat(129)] {
            let (response, _) = send(Request::get("/fine").header("x-request-id", bad)).await;
            assert!(
                response.headers()["x-request-id"]
                    .as_bytes()
                    .starts_with(b"req_")
            );
        }
    }

    #[tokio::test]
    async fn a_panic_is_a_problem_without_details() {
        let (response, body) = send(Request::get("/broken").header("x-request-id", "r1")).await;
        assert_eq!(response.status(), 500);
        assert_eq!(
            response.headers()["content-type"],
            "application/problem+json"
        );
        assert!(body.contains(r#""request_id":"r1""#), "{body}");
        assert!(!body.contains("secret"), "{body}");
    }

    #[tokio::test]
    async fn unknown_routes_and_wrong_methods_are_problems() {
        let (response, body) = send(Request::get("/nowhere")).await;
        assert_eq!(response.status(), 404);
        assert!(body.contains(r#""code":"route_not_found""#), "{body}");
        assert!(body.contains(r#""instance":"/nowhere""#), "{body}");
        let (response, body) = send(Request::delete("/fine")).await;
        assert_eq!(response.status(), 405);
        assert_eq!(response.headers()["allow"], "GET,HEAD");
        assert!(body.contains(r#""code":"method_not_allowed""#), "{body}");
    }
}
