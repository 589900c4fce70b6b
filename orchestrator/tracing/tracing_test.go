package tracing

import (
	"bytes"
	"compress/gzip"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.opentelemetry.io/otel"
)

// TestStart: spans get to a collector, with who made them, and without one nothing is made.
func TestStart(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	stop, err := Start(t.Context(), "", "v1", log)
	if err != nil {
		t.Fatal(err)
	}
	if _, span := otel.Tracer("x").Start(t.Context(), "nothing"); span.IsRecording() {
		t.Error("there is a span")
	}
	if err := stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	got := make(chan string, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(r.Body)
			if err != nil {
				t.Error(err)
				return
			}
			body = z
		}
		var b bytes.Buffer
		if _, err := io.Copy(&b, body); err != nil {
			t.Error(err)
		}
		got <- r.URL.Path + " " + b.String()
	}))
	defer srv.Close()
	stop, err = Start(t.Context(), srv.URL, "v1.2.3", log)
	if err != nil {
		t.Fatal(err)
	}
	_, span := otel.Tracer("x").Start(t.Context(), "a create")
	span.End()
	if err := stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	sent := <-got
	for _, want := range []string{"/v1/traces ", "a create", "cube", "v1.2.3"} {
		if !strings.Contains(sent, want) {
			t.Errorf("%q isn't in %q", want, sent)
		}
	}
}
