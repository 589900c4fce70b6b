package control

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestFollow: what is told comes one by one, and its end or its error, of its class, last.
func TestFollow(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	full := errdefs.ErrResourceExhausted.WithMessage("it is full")
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		lines := NewLines(w)
		switch r.URL.Path {
		case "/refused":
			lines.End(nil, full)
			return
		case "/dies":
			lines.Tell("one")
			panic(http.ErrAbortHandler)
		}
		lines.Tell("one")
		lines.Tell("two")
		if r.URL.Path == "/fails" {
			lines.End(nil, full)
			return
		}
		lines.End("three", nil)
	})
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	for path, c := range map[string]struct {
		want string
		is   func(error) bool
	}{
		"/": {"one two three", func(err error) bool { return err == nil }}, "/refused": {"", errdefs.IsResourceExhausted},
		"/fails": {"one two", errdefs.IsResourceExhausted}, "/dies": {"one", errdefs.IsUnavailable},
	} {
		var got []string
		err := Follow(t.Context(), socket, path, struct{}{}, func(b json.RawMessage) error {
			var s string
			err := json.Unmarshal(b, &s)
			got = append(got, s)
			return err
		})
		if strings.Join(got, " ") != c.want || !c.is(err) {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	mine := errors.New("mine")
	if err := Follow(t.Context(), socket, "/", nil, func(json.RawMessage) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("%v", err)
	}
}
