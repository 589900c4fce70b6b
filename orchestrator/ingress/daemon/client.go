package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/control"
)

// Client speaks to a proxy by its socket. Errors are errdefs.ErrUnavailable where none listens there.
type Client struct{ Socket string }

// Status asks how it does.
func (c Client) Status(ctx context.Context) (s Status, err error) {
	err = control.Ask(ctx, c.Socket, http.MethodGet, pathStatus, nil, &s)
	return s, err
}

// Drain has it take nothing new, and end when all that is open has ended.
func (c Client) Drain(ctx context.Context) error {
	return control.Ask(ctx, c.Socket, http.MethodPost, pathDrain, nil, nil)
}

// Stop has it end soon.
func (c Client) Stop(ctx context.Context) error {
	return control.Ask(ctx, c.Socket, http.MethodPost, pathStop, nil, nil)
}

// get begins an answer that isn't JSON, which the caller closes.
func (c Client) get(ctx context.Context, path string) (io.ReadCloser, error) {
	t := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://cube"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the proxy: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("ask the proxy: it answers %s", resp.Status), resp.Body.Close())
	}
	return resp.Body, nil
}

func (c Client) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", c.Socket)
}

// maxMetrics bounds what is read of metrics, in bytes.
const maxMetrics = 4 << 20

// Metrics are in Prometheus's text format.
func (c Client) Metrics(ctx context.Context) ([]byte, error) {
	body, err := c.get(ctx, pathMetrics)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, maxMetrics))
}

// Life tells of the proxy's life: the channel is closed when that has ended, or ctx has.
func (c Client) Life(ctx context.Context) (<-chan struct{}, error) {
	body, err := c.get(ctx, pathLife)
	if err != nil {
		return nil, err
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = io.Copy(io.Discard, body) // it has nothing to say, but how it ends
		_ = body.Close()
	}()
	return over, nil
}

// Listener gets the port from it.
func (c Client) Listener(ctx context.Context) (*net.TCPListener, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the proxy: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if _, err := io.WriteString(conn, "GET "+pathListener+" HTTP/1.1\r\nHost: cube\r\n\r\n"); err != nil {
		return nil, fmt.Errorf("ask the proxy: %w", err)
	}
	var b [1]byte
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(b[:], oob)
	if err != nil {
		return nil, fmt.Errorf("take the port over: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, errors.New("take the port over: the proxy doesn't give it")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, errors.New("take the port over: the proxy gives something else")
	}
	unix.CloseOnExec(fds[0])
	f := os.NewFile(uintptr(fds[0]), "listener")
	defer f.Close()
	return tcpListener(f)
}
