package e2b

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// scrape is what Prometheus is told.
func (c *client) scrape() string {
	c.Helper()
	resp, err := c.http.Get("http://" + s.Config.API.Listen.String() + "/metrics")
	if err != nil {
		c.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		c.Fatalf("%s %.200s, %v", resp.Status, text, err)
	}
	return string(text)
}

// TestMetrics: one scrape has the API's, the proxy's and each running sandbox's, and a sandbox's of the past are there for its team;
// a guest gets to none of them, and neither does who comes by the proxy.
func TestMetrics(t *testing.T) {
	c := newClient(t)
	sb := c.create(nil)
	defer c.killAll()
	c.says(sb, "head -c 1M /dev/zero | wc -c", "1048576")
	type sample struct {
		At       int64 `json:"timestampUnix"`
		CPUs     int   `json:"cpuCount"`
		MemTotal int64 `json:"memTotal"`
	}
	var past []sample
	s.Eventually(t, time.Minute, "samples that nobody has asked for", func() bool {
		time.Sleep(time.Duration(s.Config.API.MetricsInterval))
		c.do("GET", fmt.Sprintf("/sandboxes/%s/metrics?end=%d", sb.ID, time.Now().Add(-time.Second).Unix()), nil, &past, 200)
		return len(past) >= 2
	})
	if past[0].At >= past[1].At || past[0].CPUs < 1 || past[0].MemTotal < 256<<20 {
		t.Errorf("%+v", past)
	}
	told := c.scrape()
	for _, want := range []string{
		`cube_api_request_seconds_count{code="201",route="POST /v2/sandboxes"}`, "cube_ingress_up 1", `cube_ingress_requests_total{class="2xx"}`,
		`cube_sandboxes{state="running"}`, `cube_sandbox_stage_seconds_count{result="ok",stage="create"}`, "process_resident_memory_bytes",
	} {
		if !strings.Contains(told, want) {
			t.Errorf("there is no %s", want)
		}
	}
	of := fmt.Sprintf(`{sandbox="%s",team="`, sb.ID)
	for _, want := range []string{"host_cpu_seconds_total", "host_memory_bytes", "memory_used_bytes", "disk_used_bytes", "network_transmit_bytes_total", "network_receive_packets_total"} {
		_, rest, ok := strings.Cut(told, "cube_sandbox_"+want+of)
		line, _, _ := strings.Cut(rest, "\n")
		if !ok || strings.HasSuffix(line, " 0") {
			t.Errorf("%s of the sandbox: %q", want, line)
		}
	}
	// 10.200.255.254 is the gateway's.
	if out, err := c.run(sb, "for h in 127.0.0.1 10.200.255.254; do curl -s -m 5 http://$h:3000/metrics; done; true"); err != nil || strings.Contains(out, "cube_") {
		t.Errorf("a guest reads %.100q, %v", out, err)
	}
	req, err := http.NewRequest("GET", "http://"+s.Config.Proxy.Listen.String()+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = "api." + s.Config.Proxy.Name()
	resp, err := c.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 403 {
		t.Errorf("by the proxy: %s", resp.Status)
	}
}
