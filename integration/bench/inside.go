package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

// door is a way to a sandbox's envd.
type door struct {
	name, url string
	header    http.Header
	run       sample
	down, up  sample
}

// byProxy is the way that clients take.
func (u *user) byProxy(sb sandbox) *door {
	return &door{name: "by the proxy", url: "http://" + u.Config.Proxy.Listen.String(), header: http.Header{
		target.HeaderID: {sb.ID}, target.HeaderPort: {strconv.Itoa(ingress.EnvdPort)}, "X-Access-Token": {sb.Token},
	}}
}

// directly is that of the host alone.
func (u *user) directly(sb sandbox) (d *door, err error) {
	err = u.Host.Do(func() error {
		a, err := network.New(u.Config).Find(u.ctx, u.Config.Containerd.Namespace, sb.ID)
		if err != nil {
			return err
		}
		d = &door{name: "directly", url: "http://" + netip.AddrPortFrom(a.Address, ingress.EnvdPort).String(), header: http.Header{"X-Access-Token": {sb.Token}}}
		return nil
	})
	return d, err
}

func (d *door) request(ctx context.Context, method, path string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, d.url+path, body)
	if err == nil {
		req.Header = d.header.Clone()
	}
	return req, err
}

// inside measures commands and files in a sandbox, by both ways in turn.
func (u *user) inside(n int) error {
	sb, _, err := u.create()
	if err != nil {
		return err
	}
	direct, err := u.directly(sb)
	if err != nil {
		return err
	}
	load := loadNow()
	doors := []*door{direct, u.byProxy(sb)}
	for range n {
		for _, d := range doors {
			if err := u.command(d); err != nil {
				return err
			}
		}
	}
	few := max(2, n/4)
	for range few {
		for _, d := range doors {
			if err := u.transfer(d); err != nil {
				return err
			}
		}
	}
	fmt.Printf("\n## E2B's API: commands and files in a sandbox\n\nOf 2 vCPUs and 512 MiB; in turn; load before: %s. Commands as the SDKs run them, `/bin/bash -l -c`.\n\n", load)
	fmt.Printf("| | n | directly | by the proxy | ratio |\n| --- | --- | --- | --- | --- |\n")
	a, b := doors[0], doors[1]
	fmt.Printf("| `true`, p50 | %d | %.0f ms | %.0f ms | %.2f |\n", n, ms(a.run.quantile(0.5)), ms(b.run.quantile(0.5)), ms(a.run.quantile(0.5))/ms(b.run.quantile(0.5)))
	for _, row := range []struct {
		name string
		of   func(*door) sample
	}{{"100 MB down, `GET /files`", func(d *door) sample { return d.down }}, {"100 MB up, `POST /files`", func(d *door) sample { return d.up }}} {
		x, y := row.of(a).quantile(0.5), row.of(b).quantile(0.5)
		fmt.Printf("| %s | %d | %.1f MB/s | %.1f MB/s | %.2f |\n", row.name, few, transferSize/1e6/x.Seconds(), transferSize/1e6/y.Seconds(), x.Seconds()/y.Seconds())
	}
	return u.kill(sb)
}

// command runs true.
func (u *user) command(d *door) error {
	rpc := process.NewProcessClient(u.http, d.url)
	req := connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", "true"}}, Stdin: new(bool)})
	for k, v := range d.header {
		req.Header()[k] = v
	}
	began := time.Now()
	events, err := rpc.Start(u.ctx, req)
	if err != nil {
		return err
	}
	defer events.Close()
	for events.Receive() {
		if end := events.Msg().GetEvent().GetEnd(); end != nil {
			if d.run = append(d.run, time.Since(began)); end.GetExitCode() != 0 {
				return fmt.Errorf("true, %s: %s", d.name, end.GetStatus())
			}
		}
	}
	return events.Err()
}

// transfer writes a file, and reads it.
func (u *user) transfer(d *door) error {
	const path = "/files?path=/home/user/transfer&username=user"
	up, err := d.request(u.ctx, http.MethodPost, path, io.LimitReader(zeros{}, transferSize))
	if err != nil {
		return err
	}
	up.Header.Set("Content-Type", "application/octet-stream")
	began := time.Now()
	if _, err := u.do(up); err != nil {
		return err
	}
	d.up = append(d.up, time.Since(began))
	down, err := d.request(u.ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	down.Header.Set("Accept-Encoding", "identity") // zeros would be fewer
	began = time.Now()
	resp, err := u.http.Do(down)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	got, err := io.Copy(io.Discard, resp.Body)
	if err != nil || got != transferSize {
		return fmt.Errorf("GET %s, %s: %s, %d bytes: %w", path, d.name, resp.Status, got, err)
	}
	d.down = append(d.down, time.Since(began))
	return nil
}
