// Package tracing sends the spans of this process to a collector, where one is configured. Who makes spans takes them from
// OpenTelemetry's API and knows nothing of this.
package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
)

// sendTimeout bounds an attempt to send spans. They are lost after it, like those that there are too many of.
const sendTimeout = 10 * time.Second

// Start has the spans that are made from now on sent to a collector, by OTLP over HTTP; "" leaves them unmade. stop sends what
// is left. It doesn't matter whether the collector is there: that it isn't is logged, and spans are lost.
func Start(ctx context.Context, collector, version string, log *slog.Logger) (stop func(context.Context) error, err error) {
	if collector == "" {
		return func(context.Context) error { return nil }, nil
	}
	to, err := url.JoinPath(collector, "v1", "traces")
	if err != nil {
		return nil, fmt.Errorf("send traces to %s: %w", collector, err)
	}
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(to), otlptracehttp.WithTimeout(sendTimeout))
	if err != nil {
		return nil, fmt.Errorf("send traces to %s: %w", collector, err)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	provider := trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithResource(resource.NewSchemaless(
		attribute.String("service.name", "cube"), attribute.String("service.version", version), attribute.String("host.name", host))))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are lost", "error", err) }))
	otel.SetTracerProvider(provider)
	return provider.Shutdown, nil
}
