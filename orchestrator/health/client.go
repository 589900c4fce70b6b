package health

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
)

// reportLimit bounds the answer of /readyz, in bytes.
const reportLimit = 1 << 20

// Query asks the daemon behind a unix socket for its report.
func Query(ctx context.Context, socket string) (Report, error) {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://cube/readyz", nil)
	if err != nil {
		return Report{}, err
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return Report{}, fmt.Errorf("ask %s whether it is ready: %w", socket, err)
	}
	defer resp.Body.Close()
	var r Report
	if err := json.NewDecoder(io.LimitReader(resp.Body, reportLimit)).Decode(&r); err != nil {
		return Report{}, fmt.Errorf("ask %s whether it is ready: status %s: %w", socket, resp.Status, err)
	}
	return r, nil
}
