package proxy

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// TestGRPC goes by HTTP/2 all the way, by TLS and without.
func TestGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	hs := health.NewServer()
	healthpb.RegisterHealthServer(srv, hs)
	go srv.Serve(l)
	defer srv.Stop()
	c := newControl()
	w := worldOf(t, c, c, l.Addr())
	c.put(w.route)
	conn, err := grpc.NewClient("passthrough:///"+w.server.Listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(w.host()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	client := healthpb.NewHealthClient(conn)
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	for range 100 { // an answer that has all in its header, by which it ends
		if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{Service: "none"}); err == nil || !strings.Contains(err.Error(), "NotFound") {
			t.Fatalf("the status is lost: %v", err)
		}
	}
	watch, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, status := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING} {
		if r, err := watch.Recv(); err != nil || r.Status != status {
			t.Fatal(r, err)
		}
		hs.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	}
	w.route.Epoch = "e2"
	c.put(w.route)
	if _, err := watch.Recv(); err == nil {
		t.Error("the stream isn't cut")
	}
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("in the next epoch: %v", err)
	}
}

func TestProtocolOfTheClient(t *testing.T) {
	w := newWorld(t, mirror)
	ts := httptest.NewUnstartedServer(w.proxy)
	ts.EnableHTTP2 = true
	ts.StartTLS()
	defer ts.Close()
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for _, tc := range []struct {
		name, url, kind, want string
		transport             *http.Transport
	}{
		{"h2", ts.URL, "", "HTTP/1.1", &http.Transport{ForceAttemptHTTP2: true}},
		{"gRPC by h2", ts.URL, "application/grpc+proto", "HTTP/2.0", &http.Transport{ForceAttemptHTTP2: true}},
		{"gRPC by HTTP/1.1", ts.URL, "application/grpc-web", "HTTP/1.1", &http.Transport{}},
		{"prior knowledge", w.server.URL, "", "HTTP/2.0", &http.Transport{Protocols: h2c}},
		{"plain", w.server.URL, "", "HTTP/1.1", &http.Transport{}},
	} {
		tc.transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
		r, err := http.NewRequest(http.MethodPost, tc.url+"/", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		r.Host = w.host()
		r.Header.Set("Content-Type", tc.kind)
		resp, err := (&http.Client{Transport: tc.transport, Timeout: timeout}).Do(r)
		if err != nil {
			t.Fatal(tc.name, err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if !strings.HasPrefix(string(b), "POST / "+tc.want+"\n") {
			t.Errorf("%s: %s", tc.name, b)
		}
		tc.transport.CloseIdleConnections()
	}
}
