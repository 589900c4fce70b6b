package e2b

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"
)

// TestPatient: an upload of which a little comes again and again ends when its time is over.
func TestPatient(t *testing.T) {
	ended := make(chan error, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, &patient{r.Body, http.NewResponseController(w), time.Minute, time.Now().Add(100 * time.Millisecond)})
		ended <- err
	}))
	defer srv.Close()
	body, feed := io.Pipe()
	go func() {
		for err := error(nil); err == nil; _, err = feed.Write([]byte("a little")) {
			time.Sleep(time.Millisecond)
		}
	}()
	go func() {
		if resp, err := http.Post(srv.URL, "application/x-tar", body); err == nil {
			resp.Body.Close()
		}
	}()
	defer body.Close()
	select {
	case err := <-ended:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it goes on")
	}
}
